"""The native engine on a GPU: one thread block trains one client, from its first step to its last, in code generated for the network."""
