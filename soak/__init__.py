"""The soak: hours of random use, looking for tracebacks, hangs, lost runs and silent differences. `make soak` runs it."""
