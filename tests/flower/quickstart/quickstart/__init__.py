"""An app as users have it: Flower and PyTorch only."""
