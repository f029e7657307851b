"""Engines that train many clients in parallel on one device, mainly for GPUs."""
