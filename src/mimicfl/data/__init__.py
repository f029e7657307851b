"""Datasets, their partition over clients, and all clients' samples on one device."""
