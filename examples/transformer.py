"""A small transformer learns to add numbers, in data parallel and in tensor parallel at once.

The weights of each layer are divided among the ranks of one group: attention by heads, the other matrices by hidden
units. The groups divide each batch. With four ranks these are two groups of two. A tenth of all additions is never
seen in training, and at the end the program tells how many of these it gets right.

    python transformer.py                            # one process
    python -m jaxmpi.run -n 4 transformer.py         # the same result, but for rounding, on 2 x 2 processes
    python -m jaxmpi.run -n 4 transformer.py --parts 4      # one group of four

A run compares loss and gradient with one process, shows a progress bar with the loss, prints how many additions are
right, writes `transformer.png` and prints where it is.

Where a layer begins, `replicate` sums the cotangents of the group, as each rank goes on with other weights. Where the
layer ends, `allreduce` sums what the ranks have. Over the groups it is the other way round: `replicate` at the weights,
and `allreduce` at the loss.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from tqdm import tqdm

import jaxmpi
from jaxmpi import allreduce, replicate

SYMBOLS = "0123456789+="
DIGITS = 2  # of a number; a line is 12+34=640, the sum from right to left
ANSWER = DIGITS + 1
LENGTH = 3 * DIGITS + 3
LAYERS, WIDTH, HEADS, HIDDEN = 2, 64, 4, 128
BATCH, RATE, LARGEST = 64, 3e-3, 1.0  # lines, of learning, and of a gradient's norm
SEED = 0

DIVIDED = {"qkv": 2, "out": 0, "up": 1, "down": 0}
"""The axis along which a matrix is divided. All others are the same on all ranks."""

Parameters = dict[str, list[jax.Array]]


class Groups(NamedTuple):
    tensor: MPI.Comm  # the ranks that share one copy of the weights
    data: MPI.Comm  # the ranks that have the same part of the weights


ALONE = Groups(MPI.COMM_SELF, MPI.COMM_SELF)


# The network. h has shape (lines, LENGTH - 1, WIDTH), and is the same on all ranks of a group.


def make_parameters(key: jax.Array) -> Parameters:
    """Return the whole parameters, matrices of a layer as items of a list."""
    shapes = {"qkv": (WIDTH, 3, HEADS, WIDTH // HEADS), "out": (HEADS, WIDTH // HEADS, WIDTH)}
    shapes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    sizes = {"qkv": WIDTH, "out": WIDTH, "up": WIDTH, "down": HIDDEN}
    keys = iter(jax.random.split(key, LAYERS * len(shapes) + 2))
    parameters = {
        name: [jax.random.normal(next(keys), shape) / sizes[name] ** 0.5 for _ in range(LAYERS)]
        for name, shape in shapes.items()
    }
    ends = [jax.random.normal(next(keys), (n, WIDTH)) / WIDTH**0.5 for n in (len(SYMBOLS), LENGTH - 1)]
    return parameters | {"ends": ends}  # of the symbols, and of the places


def part_of(whole: Parameters, tensor: MPI.Comm) -> Parameters:
    def part(name: str, x: jax.Array) -> jax.Array:
        return jnp.split(x, tensor.size, DIVIDED[name])[tensor.rank] if name in DIVIDED else x

    return {name: [part(name, x) for x in matrices] for name, matrices in whole.items()}


def normalized(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)


def attend(qkv: jax.Array, out: jax.Array, h: jax.Array) -> jax.Array:
    """Return what the heads of this rank add to h."""
    q, k, v = jnp.einsum("bld,dchk->cbhlk", h, qkv)
    scores = jnp.einsum("bhlk,bhmk->bhlm", q, k) / k.shape[-1] ** 0.5
    scores = jnp.where(np.tri(h.shape[1], dtype=bool), scores, -jnp.inf)  # a place sees the places before it
    return jnp.einsum("bhlm,bhmk,hkd->bld", jax.nn.softmax(scores), v, out)


def predict(parameters: Parameters, lines: jax.Array, groups: Groups) -> jax.Array:
    """Return the logits of the symbol behind each place, shape (lines, LENGTH - 1, SYMBOLS)."""
    symbols, places = parameters["ends"]
    h = symbols[lines[:, :-1]] + places
    for qkv, out, up, down in zip(*(parameters[name] for name in DIVIDED), strict=True):
        z = replicate(normalized(h), comm=groups.tensor)
        h += allreduce(attend(qkv, out, z), MPI.SUM, comm=groups.tensor)
        z = replicate(normalized(h), comm=groups.tensor)
        h += allreduce(jax.nn.gelu(z @ up) @ down, MPI.SUM, comm=groups.tensor)
    return normalized(h) @ symbols.T


def loss_of(parameters: Parameters, lines: jax.Array, groups: Groups) -> jax.Array:
    """Return the cross entropy of the answers, a mean over the lines of all groups; `lines` are this group's."""
    logits = predict(replicate(parameters, comm=groups.data), lines, groups)[:, -ANSWER:]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), lines[:, -ANSWER:, None], axis=-1)
    total, count = allreduce((-jnp.sum(chosen), lines.shape[0] * ANSWER), MPI.SUM, comm=groups.data)
    return total / count


def clip(gradient: Parameters, tensor: MPI.Comm) -> Parameters:
    """Scale a gradient whose norm is larger than LARGEST. The norm is that of the whole gradient."""
    squares = {name: sum(jnp.sum(x**2) for x in matrices) for name, matrices in gradient.items()}
    own = allreduce(sum(squares[name] for name in DIVIDED), MPI.SUM, comm=tensor)
    factor = jnp.minimum(1, LARGEST / jnp.sqrt(own + squares["ends"]))
    return jax.tree.map(lambda x: x * factor, gradient)


# Data: all ranks draw the same lines, and each group takes a share of them.


def additions() -> tuple[np.ndarray, np.ndarray]:
    """Return the lines for training and the lines for the test, as numbers of symbols."""
    numbers = range(10**DIGITS)
    lines = [f"{a:0{DIGITS}}+{b:0{DIGITS}}={f'{a + b:0{ANSWER}}'[::-1]}" for a in numbers for b in numbers]
    lines = np.array([[SYMBOLS.index(symbol) for symbol in line] for line in lines], np.int32)
    lines = np.random.default_rng(SEED).permutation(lines)
    return lines[len(lines) // 10 :], lines[: len(lines) // 10]


def share(lines: np.ndarray, data: MPI.Comm) -> np.ndarray:
    return lines[data.rank :: data.size]


def share_right(parameters: Parameters, lines: jax.Array, groups: Groups) -> jax.Array:
    """Return how many lines have the right sum, relative to all, if the most likely symbols are chosen."""
    answers = jnp.argmax(predict(parameters, lines, groups), axis=-1)[:, -ANSWER:]
    right = jnp.sum(jnp.all(answers == lines[:, -ANSWER:], axis=1))
    right, count = allreduce((right, len(lines)), MPI.SUM, comm=groups.data)
    return right / count


def compare_with_one_process(whole: Parameters, lines: np.ndarray, groups: Groups) -> tuple[float, float]:
    """Return the relative differences of loss and gradient."""
    derive = jax.value_and_grad(loss_of)
    together, alone = (jaxmpi.jit(partial(derive, groups=chosen)) for chosen in (groups, ALONE))
    value, gradient = together(part_of(whole, groups.tensor), share(lines, groups.data))
    expected, of_all = alone(whole, lines)
    of_all = part_of(of_all, groups.tensor)
    errors = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)), gradient, of_all)
    return abs(float(value) / float(expected) - 1), float(allreduce(max(jax.tree.leaves(errors)), MPI.MAX))


def save_picture(path: Path, losses: list[float], right: list[tuple[int, float]]) -> None:
    """Draw the loss of all steps and the share of additions that are right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    axes[0].semilogy(losses, linewidth=0.8)
    axes[0].set_title("loss", loc="left")
    axes[1].plot(*zip(*right, strict=True), marker="o")
    axes[1].set_ylim(0, 1.02)
    axes[1].set_title("share of unseen additions that are right", loc="left")
    for place in axes:
        place.set_xlabel("steps")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=int, help="how many ranks share the weights (default: 2 of an even number)")
    parser.add_argument("--steps", type=int, default=1200, help="(default: %(default)s)")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write losses and parameters")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    options = parser.parse_args()
    ranks = MPI.COMM_WORLD.size
    if options.parts is None:
        options.parts = 2 if ranks % 2 == 0 else 1
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    if options.parts < 1 or ranks % options.parts or HEADS % options.parts:
        parser.error(f"--parts must divide the {ranks} ranks and the {HEADS} heads")
    return options


def main() -> None:
    options = parse_options()
    world = MPI.COMM_WORLD
    groups = Groups(world.Split(world.rank // options.parts), world.Split(world.rank % options.parts))
    training, test = additions()
    whole = make_parameters(jax.random.key(SEED))
    differences = compare_with_one_process(whole, training[:BATCH], groups)
    if world.rank == 0:
        print(f"{world.size} processes, {groups.tensor.size} share the weights, {groups.data.size} divide the lines")
        print("Relative difference from one process: loss {:.2e}, gradient {:.2e}".format(*differences))

    parameters = part_of(whole, groups.tensor)
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, options.steps))

    @jaxmpi.jit
    def step(parameters: Parameters, state: optax.OptState, lines: jax.Array) -> tuple:
        loss, gradient = jax.value_and_grad(loss_of)(parameters, lines, groups)
        updates, state = optimizer.update(clip(gradient, groups.tensor), state)
        return optax.apply_updates(parameters, updates), state, loss

    judge = jaxmpi.jit(partial(share_right, groups=groups))
    state, losses, right = optimizer.init(parameters), [], []
    generator = np.random.default_rng(SEED)
    with tqdm(range(options.steps), unit=" steps", disable=world.rank != 0) as bar:
        for i in bar:
            lines = training[generator.choice(len(training), BATCH, replace=False)]
            parameters, state, loss = step(parameters, state, share(lines, groups.data))
            losses.append(float(loss))
            if (i + 1) % max(1, options.steps // 10) == 0:
                right.append((i + 1, float(judge(parameters, share(test, groups.data)))))
                bar.set_postfix_str(f"loss {losses[-1]:.3g}")
    if world.rank != 0:
        return
    print(f"Loss {losses[-1]:.3g}. Of {len(test)} additions never seen {right[-1][1]:.1%} are right")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "transformer.png").resolve()
    save_picture(picture, losses, right)
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, losses=losses, symbols=parameters["ends"][0])
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
