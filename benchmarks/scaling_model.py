"""What operations cost on up to 100,000 ranks, on paper: `python benchmarks/scaling_model.py --plot scaling.png`.

In the LogGP model (Alexandrov et al., 1995) a message of k bytes takes o of its sender's time, arrives L + k G after
that, takes o of its receiver's, and the next one leaves g after it at the earliest. Each operation has a formula, and a
simulation rank by rank, which agrees with the formula where nothing disturbs a rank, and shows what happens where the
operating system does. jaxmpi adds to each operation and message what was measured beside C on one machine.

Nothing here was measured on a network: the figures are as good as the model and its parameters.
"""

import argparse
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

US = 1e-6


@dataclass(frozen=True)
class Network:
    """Seconds, and seconds per byte."""

    L: float
    o: float
    g: float
    G: float
    call: float = 0.0
    """What a library adds to an operation."""
    message: float = 0.0
    """And to each message of an exchange of halos, at its sender."""


# Half a round trip of osu_latency on a Cray XC40 (Aries), by Open MPI: 1.2 us for no bytes, which is L + 2 o, and
# 435 us for 4 MiB (gist.github.com/hppritcha/6a3acd0c192fcfd082bd543fc98e6fe6). How 1.2 us divides into L and o, and g,
# are assumptions.
ARIES = Network(L=0.8 * US, o=0.2 * US, g=0.3 * US, G=435 * US / (4 << 20))
# docs/performance.md: in a loop allreduce of 4 bytes takes 0.18 us longer than in C, an exchange of one small field,
# two messages, 0.8 us.
OURS = replace(ARIES, call=0.18 * US, message=0.4 * US)

CELLS = 128
"""Of a block, along each of three axes; float32."""
NEIGHBOURS = [at for at in itertools.product((-1, 0, 1), repeat=3) if any(at)]
HALO = [4 * CELLS ** (3 - sum(map(abs, at))) for at in NEIGHBOURS]
"""Bytes of the message to each of 26 neighbours."""


# --- formulas --------------------------------------------------------------------------------------------------------


def rounds(ranks):
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0


def passing(network, size):
    """One message, from the call of its sender to the return of its receiver."""
    return network.L + 2 * network.o + size * network.G


def allreduce(network, ranks, size):
    """Recursive doubling, or halving and doubling (Rabenseifner), whichever is faster."""
    doubling = rounds(ranks) * passing(network, size)
    halving = 2 * rounds(ranks) * passing(network, 0) + 2 * size * (1 - 1 / ranks) * network.G
    return network.call + min(doubling, halving)


def exchange(network, ranks, sizes):
    """All messages leave one after the other, and are taken as they come; nothing on one rank."""
    if ranks == 1:
        return 0.0
    network = replace(network, o=network.o + network.message)
    leaves = max(network.o, network.g)
    last = sum(max(leaves, size * network.G) for size in sizes[:-1]) + passing(network, sizes[-1])
    return network.call + last


def fourier(network, ranks, size):
    """Two redistributions of `size` bytes of a rank between pencils, in groups of about the square root of all ranks:
    one message to each of the group."""
    group = math.isqrt(ranks)
    return 2 * exchange(network, group, [size / group] * (group - 1)) if group > 1 else 0.0


# --- simulations -----------------------------------------------------------------------------------------------------


@dataclass
class Noise:
    """The operating system takes `length` seconds of a rank every `period` seconds, each rank at its own times."""

    length: float = 0.0
    period: float = 1.0
    seed: int = 1

    def __post_init__(self):
        self._random = np.random.default_rng(self.seed)

    def lasts(self, seconds, ranks):
        """How long each rank takes for so much work."""
        if self.length == 0:
            return np.full(ranks, seconds)
        return seconds + self.length * self._random.poisson(seconds / self.period, ranks)


def simulate_allreduce(network, start, size, noise):
    """Recursive doubling: when each rank is done, of the time when it begins. A power of two of ranks."""
    now, ranks = start + network.call, len(start)
    for k in range(rounds(ranks)):
        sent = now + noise.lasts(network.o, ranks)
        arrives = sent[np.arange(ranks) ^ (1 << k)] + network.L + size * network.G
        now = np.maximum(sent, arrives) + noise.lasts(network.o, ranks)
    return now


def simulate_exchange(network, start, sizes, noise):
    """Halos of a periodic cube of ranks: when each rank is done, of the time when it begins."""
    side = round(len(start) ** (1 / 3))
    o = network.o + network.message
    now, done = start + network.call, np.zeros(len(start))
    for at, size in zip(NEIGHBOURS, sizes, strict=True):
        sent = now + noise.lasts(o, len(start))
        arrives = np.roll(sent.reshape((side,) * 3), at, (0, 1, 2)).ravel() + network.L + size * network.G
        done = np.maximum(done, arrives)
        now = now + np.maximum(sent - now, max(network.g, size * network.G))
    return np.maximum(done, sent) + noise.lasts(o, len(start))


def simulate_steps(network, ranks, noise, work, steps=50):
    """Seconds of a step: each works, exchanges halos and adds up a number. A power of eight of ranks."""
    now = np.zeros(ranks)
    for _ in range(steps):
        now = now + noise.lasts(work, ranks)
        now = simulate_exchange(network, now, HALO, noise)
        now = simulate_allreduce(network, now, 8, noise)
    return float(now.max()) / steps


# --- tables ----------------------------------------------------------------------------------------------------------

OPERATIONS = {
    "allreduce, 8 B": lambda network, ranks: allreduce(network, ranks, 8),
    "allreduce, 64 MiB": lambda network, ranks: allreduce(network, ranks, 64 << 20),
    "halos of 128³": lambda network, ranks: exchange(network, ranks, HALO),
    "Fourier, 128³ each": lambda network, ranks: fourier(network, ranks, 8 * CELLS**3),
}
WORK, NOISE = 1e-3, {"length": 25 * US, "period": 10e-3}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    for name, of in OPERATIONS.items():
        for ranks in (100, 1000, 10_000, 100_000):
            plain, ours = of(ARIES, ranks), of(OURS, ranks)
            print(f"{name}, {ranks} ranks: {plain / US:.4g} us, with jaxmpi {ours / US:.4g}: {ours / plain:.3f}")
    for ranks in (8, 64, 512, 4096, 32768):
        steps = {
            "undisturbed": simulate_steps(OURS, ranks, Noise(), WORK),
            "C": simulate_steps(ARIES, ranks, Noise(**NOISE), WORK),
            "jaxmpi": simulate_steps(OURS, ranks, Noise(**NOISE), WORK),
        }
        print(f"a step of {WORK * 1e3:g} ms, {ranks} ranks:", {k: f"{v / US:.5g} us" for k, v in steps.items()})
    if options.plot:
        plot(options.plot)


def plot(path):
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ranks = np.unique(np.geomspace(2, 1e5, 60).astype(int))
    figure, (times, ratios) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, of in OPERATIONS.items():
        plain, ours = (np.array([of(network, n) for n in ranks]) for network in (ARIES, OURS))
        times.loglog(ranks, ours / US, label=name)
        ratios.semilogx(ranks[plain > 0], ours[plain > 0] / plain[plain > 0], label=name)
    times.set(xlabel="ranks", ylabel="µs", title="with jaxmpi")
    ratios.set(xlabel="ranks", ylabel="times MPI alone", title="what jaxmpi adds")
    times.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
