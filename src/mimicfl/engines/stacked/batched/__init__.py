"""The batched engine: clients are stacked along a batch dimension, so that one kernel computes a layer of all of them."""
