"""`flower`: the commands around Flower, which is imported only here and only when asked for."""

import argparse

from rich.console import Console


def flower(arguments: argparse.Namespace, console: Console) -> None:
    """Call the function of the action."""
    {"new": new, "rollback": rollback, "watch": watch}[arguments.action](arguments, console)


def new(arguments: argparse.Namespace, console: Console) -> None:
    """Write a small app."""
    from ..flower.new_app import new_app

    target = new_app(arguments.folder)
    console.print(f"app in {target}", soft_wrap=True)
    console.print(f"try it: cd {arguments.folder} && python try_it.py num-rounds=3", soft_wrap=True)


def rollback(arguments: argparse.Namespace, console: Console) -> None:
    """Return a federation to an earlier checkpoint."""
    from ..flower.checkpoints import rollback

    kept = rollback(arguments.folder, arguments.to)
    console.print(f"{arguments.folder} is back after round {kept}; start the run again with the same folder to continue", soft_wrap=True)


def watch(arguments: argparse.Namespace, console: Console) -> None:
    """Serve the status page of a federation until interrupted."""
    from ..flower.watch import make_server

    with make_server(arguments.folder, arguments.port, arguments.prometheus) as server:
        console.print(f"http://127.0.0.1:{server.server_address[1]}/ shows {arguments.folder}; stop with Ctrl-C", soft_wrap=True)
        server.serve_forever()
