"""The soak test: random use of the whole package, to find tracebacks, hangs, lost runs and wrong results. `make soak` runs it."""
