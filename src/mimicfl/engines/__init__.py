"""The engines: interchangeable ways to train the active clients of a round, all checked against the plain one."""
