"""How many clients an engine for CPUs trains at a time, each on a thread or a process of its own."""


def clients_at_once(clients: int, cores: int) -> int:
    """Return one per core, or up to about twice as many if the cores would idle at the end of the round otherwise.

    Three clients on two cores: with two at a time, one core waits while the last client trains; three share both cores until the end.
    """
    tried = range(min(clients, cores), min(clients, 2 * cores + 1) + 1)
    return min(tried, key=lambda count: -(-clients // count) * max(count, cores))
