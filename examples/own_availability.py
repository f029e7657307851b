"""A custom availability pattern: phones that charge at night, in three time zones.

A pattern is a class with one method, `draw`, that returns a bool array [rounds, clients].

python examples/own_availability.py
mimicfl availability show time-zones:3 --plugin examples/own_availability.py --rounds 96
"""

from dataclasses import dataclass

import numpy as np

import mimicfl as mf
from mimicfl.seeds import stream


@mf.availability.register("time-zones")
@dataclass(frozen=True)
class TimeZones(mf.availability.Pattern):
    zones: int = 3
    day: int = 24  # rounds

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        offset = (np.arange(num_clients) % self.zones) * self.day // self.zones
        night = (np.arange(rounds)[:, None] + offset) % self.day < self.day // 3
        plugged_in = np.stack([stream(seed, "availability", t).random(num_clients) for t in range(rounds)]) < 0.6
        return night & plugged_in


if __name__ == "__main__":
    seen = mf.availability.observe(mf.availability.schedule(TimeZones(), rounds=96, num_clients=30, seed=0))
    print("\n".join(seen.sentences()))
    for algorithm in ("fedavg", "mimic"):
        history = mf.run(mf.Experiment(algorithm=algorithm, availability="time-zones:3", rounds=48))
        print(f"{algorithm:7} {100 * history.rows[-1]['test_accuracy']:.1f} %")
