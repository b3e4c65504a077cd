"""A graph network learns how heat spreads over a graph. The vertices are divided among the processes.

The graph joins points in a square that are close to each other, and some that are not. The network learns two time
steps of a diffusion that is slow where heat changes much from one vertex to the next (Perona and Malik, 1990). It
passes messages along the edges in two rounds. Some edges of a process come from vertices of other processes. Before
each round `IndexMap.exchange` brings the features of these vertices; the gradient travels back the same way.

    python graph_network.py                                     # one process
    python -m jaxmpi.run -n 2 graph_network.py                  # the same result on two, or any other number
    python -m jaxmpi.run -n 4 graph_network.py --vertices 4000  # a larger graph

Rank 0 computes the first loss and gradient alone, too, from the whole graph and without MPI, and compares. A run shows
a progress bar, prints this comparison and that of the trained network with the truth, writes `graph-network.png` and
prints where it is.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from mpi4py import MPI
from scipy.spatial import KDTree
from tqdm import tqdm

import jaxmpi
from jaxmpi import allreduce

NEIGHBOURS, SHORTCUTS = 6, 0.05  # about how many edges a vertex has; the share of edges that go anywhere
DIFFUSIVITY, STEEP = 0.25, 1.0  # of a time step; the difference between two vertices that halves it
TIME_STEPS = ROUNDS = 2
FEATURES = 16  # of a vertex, in the network
TRAINED, TESTED, BATCH = 64, 4, 4  # fields of heat
RATE = 1e-2
SEED = 0

COMM = MPI.COMM_WORLD
RANK = COMM.rank
Layers = list[dict[str, jax.Array]]
Parameters = dict[str, Any]


class Graph(NamedTuple):
    """Directed edges, each pair of neighbours twice. Vertex numbers are of this process or of the whole graph."""

    senders: np.ndarray
    receivers: np.ndarray
    weights: np.ndarray


# The data: all processes make the whole, and take their parts.


def make_graph(number: int, generator: np.random.Generator) -> tuple[np.ndarray, Graph]:
    """Return the places of the vertices and the whole graph. Shorter edges have larger weights."""
    points = generator.random((number, 2))
    radius = np.sqrt(NEIGHBOURS / (np.pi * number))
    near = KDTree(points).query_pairs(radius, output_type="ndarray")
    far = generator.integers(number, size=(int(SHORTCUTS * len(near)), 2))
    pairs = np.concatenate([near, far[far[:, 0] != far[:, 1]]])
    senders, receivers = np.concatenate([pairs, pairs[:, ::-1]]).T
    lengths = np.linalg.norm(points[senders] - points[receivers], axis=1)
    return points, Graph(senders, receivers, np.exp(-np.minimum(lengths / radius, 1)))


def draw_fields(points: np.ndarray, number: int, generator: np.random.Generator) -> np.ndarray:
    """Return random heat, (vertices, number): warm and cold regions with sharp borders, and noise."""
    waves, phases = generator.normal(scale=5, size=(2, 3, number)), generator.uniform(0, 2 * np.pi, (3, number))
    regions = np.tanh(3 * np.cos(np.einsum("vx,xwn->vwn", points, waves) + phases).sum(axis=1))
    return regions + 0.3 * generator.standard_normal(regions.shape)


def diffuse(u: np.ndarray, graph: Graph) -> np.ndarray:
    """Return the truth: u after the time steps."""
    for _ in range(TIME_STEPS):
        difference = u[graph.senders] - u[graph.receivers]
        flow = DIFFUSIVITY * graph.weights[:, None] * difference / (1 + (difference / STEEP) ** 2)
        u = u.copy()
        np.add.at(u, graph.receivers, flow)
    return u


# The network.


def make_layers(key: jax.Array, *sizes: int) -> Layers:
    initial = jax.nn.initializers.glorot_uniform()
    layers = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    return [{"w": initial(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in layers]


def make_parameters(key: jax.Array) -> Parameters:
    first, last, *keys = jax.random.split(key, 2 + 2 * ROUNDS)
    messages = [make_layers(k, 2 * FEATURES + 1, FEATURES, FEATURES) for k in keys[:ROUNDS]]
    updates = [make_layers(k, 2 * FEATURES, FEATURES, FEATURES) for k in keys[ROUNDS:]]
    return {
        "encoder": make_layers(first, 1, FEATURES),
        "rounds": list(zip(messages, updates, strict=True)),
        "decoder": make_layers(last, FEATURES, 1),
    }


def apply(layers: Layers, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.silu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def predict(parameters: Parameters, u: jax.Array, graph: Graph, exchange: Callable) -> jax.Array:
    """Return u after the time steps, (vertices, fields). `exchange` appends the features of ghosts."""
    h = apply(parameters["encoder"], u[..., None])
    weights = jnp.broadcast_to(graph.weights[:, None, None], (len(graph.weights), u.shape[1], 1))
    for message, update in parameters["rounds"]:
        there, here = exchange(h)[graph.senders], h[graph.receivers]
        messages = apply(message, jnp.concatenate([there - here, here, weights], axis=-1))
        received = jax.ops.segment_sum(messages, graph.receivers, len(u))
        h = h + apply(update, jnp.concatenate([h, received], axis=-1))
    return u + apply(parameters["decoder"], h)[..., 0]


# Results.


def gather(values: jax.Array, numbers: np.ndarray) -> np.ndarray | None:
    """Return on rank 0 the values of all processes, ordered as in the whole graph."""
    parts = COMM.gather((numbers, np.asarray(values)))
    if parts is None:
        return None
    order = np.argsort(np.concatenate([numbers for numbers, _ in parts]))
    return np.concatenate([values for _, values in parts])[order]


def save_picture(path: Path, points: np.ndarray, graph: Graph, fields: dict[str, np.ndarray], losses: list) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import LineCollection

    figure, axes = plt.subplots(1, 4, figsize=(16, 4), layout="constrained")
    edges = np.stack([points[graph.senders], points[graph.receivers]], axis=1)
    for place, (title, field) in zip(axes, fields.items(), strict=False):
        limit = np.abs(field).max()
        place.add_collection(LineCollection(edges, colors="lightgray", linewidths=0.4, zorder=0))
        dots = place.scatter(*points.T, c=field, s=12, cmap="RdBu_r", vmin=-limit, vmax=limit)
        figure.colorbar(dots, ax=place, pad=0.02)
        place.set(xticks=[], yticks=[], aspect="equal")
        place.set_title(title, loc="left")
    axes[3].semilogy(losses)
    axes[3].set(xlabel="steps")
    axes[3].set_title("loss", loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# The programme.


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vertices", type=int, default=600, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of the training (default: %(default)s)")
    parser.add_argument("--save-state", type=Path, metavar="FILE.npz", help="write losses, first gradient, fields")
    parser.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    jax.config.update("jax_enable_x64", True)
    generator = np.random.default_rng(SEED)
    points, whole = make_graph(options.vertices, generator)
    before = draw_fields(points, TRAINED + TESTED, generator)
    after = diffuse(before, whole)
    batches = generator.integers(TRAINED, size=(options.steps, BATCH))
    tested = slice(TRAINED, TRAINED + TESTED)

    # Each process owns a strip of the square, and the edges that end there.
    owner = np.argsort(np.argsort(points[:, 0])) * COMM.size // options.vertices
    vertices, senders, receivers, edges = jaxmpi.IndexMap.from_edges(whole.senders, whole.receivers, owner)
    graph = Graph(senders, receivers, whole.weights[edges])

    def exchange(h: jax.Array) -> jax.Array:
        return vertices.exchange(vertices.pad(h))

    def loss(parameters: Parameters, u: jax.Array, truth: jax.Array) -> jax.Array:
        """Return the mean square error over the vertices of all processes."""
        error = predict(jaxmpi.replicate(parameters), u, graph, exchange) - truth
        return allreduce(jnp.sum(error**2), MPI.SUM) / (options.vertices * u.shape[1])

    def loss_alone(parameters: Parameters, u: jax.Array, truth: jax.Array) -> jax.Array:
        return jnp.mean((predict(parameters, u, whole, lambda h: h) - truth) ** 2)

    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, options.steps))

    @jaxmpi.jit
    def step(parameters: Parameters, state: optax.OptState, u: jax.Array, truth: jax.Array) -> tuple:
        value, gradient = jax.value_and_grad(loss)(parameters, u, truth)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(parameters, updates), state, value

    own = vertices.owned
    parameters = make_parameters(jax.random.key(SEED))
    first = jaxmpi.jit(jax.value_and_grad(loss))(parameters, before[own][:, tested], after[own][:, tested])
    gradient = ravel_pytree(first[1])[0]
    if RANK == 0:
        alone = jax.jit(jax.value_and_grad(loss_alone))(parameters, before[:, tested], after[:, tested])
        expected = ravel_pytree(alone[1])[0]
        errors = abs(first[0] / alone[0] - 1), jnp.linalg.norm(gradient - expected) / jnp.linalg.norm(expected)

    state, losses = optimizer.init(parameters), []
    with tqdm(batches, desc="training", unit=" steps", disable=RANK != 0) as bar:
        for batch in bar:
            parameters, state, value = step(parameters, state, before[own][:, batch], after[own][:, batch])
            losses.append(float(value))
            bar.set_postfix_str(f"loss {losses[-1]:.2e}", refresh=False)
    predicted = jaxmpi.jit(lambda p, u: predict(p, u, graph, exchange))(parameters, before[own][:, tested])
    predicted = gather(predicted, own)
    if RANK != 0:
        return
    change = np.mean((after - before)[:, tested] ** 2)
    left = np.mean((predicted - after[:, tested]) ** 2)
    print(f"{COMM.size} processes, {options.vertices} vertices, {len(whole.senders)} edges")
    print(f"Relative difference from one process: loss {float(errors[0]):.1e}, gradient {float(errors[1]):.1e}")
    print(f"Of the changes by diffusion the network predicts {100 * (1 - np.sqrt(left / change)):.1f} %")
    fields = {"before": before[:, TRAINED], "change": (after - before)[:, TRAINED]}
    fields["predicted change"] = predicted[:, 0] - before[:, TRAINED]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture = (options.output_dir / "graph-network.png").resolve()
    save_picture(picture, points, whole, fields, losses)
    print(f"Picture: {picture}")
    if options.save_state:
        np.savez(options.save_state, losses=losses, gradient=gradient, before=before, after=after, predicted=predicted)
        print(f"State: {options.save_state.resolve()}")


if __name__ == "__main__":
    main()
