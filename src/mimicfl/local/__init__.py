"""The client's side: models, losses, learning rates and local SGD."""
