"""A misbehaving part of the soak for the tests of the runner: depending on its first seed it fails, crashes, hangs or does nothing."""

import os
import time

from soak.outcome import Outcome

FAILS, DIES, HANGS, NOTHING = 10, 20, 30, 40


def trials(seed, enough, folder):
    if seed == NOTHING:
        return
    yield Outcome("odd", "ok", seed, "a good trial", counts={"good": 1})
    if seed == DIES:
        os._exit(7)
    if seed == HANGS:
        time.sleep(3600)
    while not enough():
        seed += 1
        yield Outcome("odd", "failed", seed, "a bad trial", "it is bad\nvery bad", "do it again")
