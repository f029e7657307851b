"""One run on many machines: the driver divides the active clients among workers, which train them with an engine of their own."""
