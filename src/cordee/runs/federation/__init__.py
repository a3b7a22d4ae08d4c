"""Federated learning between real sites: a server that keeps the parameters, and clients that keep their data."""
