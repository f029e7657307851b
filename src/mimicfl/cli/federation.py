"""`flower`: the commands around Flower, which is imported only here and only when asked for."""

import argparse

from rich.console import Console


def flower(arguments: argparse.Namespace, console: Console) -> None:
    from ..flower.new import new_app

    target = new_app(arguments.folder)
    console.print(f"app in {target}", soft_wrap=True)
    console.print(f"try it: cd {arguments.folder} && python try_it.py num-rounds=3", soft_wrap=True)
