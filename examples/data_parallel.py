"""A small network learns to read handwritten digits. One or many processes divide each batch among them.

This is JAX's own data parallelism: a batch is an array sharded over all devices, the parameters are replicated, and
`jax.jit` adds up the gradients. There is not a word of MPI in the program. The launcher makes one mesh of the
devices of all processes, and sends the sums by MPI.

    python data_parallel.py                                             # one process
    python -m jaxmpi.run -n 4 --collectives mpi data_parallel.py        # the same result on four
    python -m jaxmpi.run -n 4 --collectives gloo data_parallel.py       # by gloo, JAX's default

Any number of processes will do: a batch that cannot be divided among them is filled up with images of weight zero. So
only rounding depends on the number of processes. Needs optax, and scikit-learn for the digits.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

PIXELS, CLASSES = 64, 10
TESTED = 360  # images that are not used for training
REPORTS = 8  # how often a run stops to evaluate the network

# With axes of the type Auto the compiler decides where devices communicate.
MESH = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
SHARDED = NamedSharding(MESH, PartitionSpec("batch"))
REPLICATED = NamedSharding(MESH, PartitionSpec())

Layers = list[dict[str, jax.Array]]
Batch = tuple[jax.Array, jax.Array, jax.Array]
"""Images (n, PIXELS), their digits (n,), and weights (n,): one, or zero for an image that fills up the batch."""


def make_batch(images: np.ndarray, digits: np.ndarray, chosen: np.ndarray) -> Batch:
    """Return the batch of the images with the numbers `chosen`. Each process makes only the part for local devices."""
    missing = -len(chosen) % jax.device_count()
    weights = np.pad(np.ones(len(chosen), np.float32), (0, missing))
    chosen = np.pad(chosen, (0, missing))
    n = len(chosen)
    return (
        jax.make_array_from_callback((n, PIXELS), SHARDED, lambda part: images[chosen[part[0]]]),
        jax.make_array_from_callback((n,), SHARDED, lambda part: digits[chosen[part[0]]]),
        jax.make_array_from_callback((n,), SHARDED, lambda part: weights[part[0]]),
    )


def draw(numbers: np.ndarray, size: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield batches of `size` numbers without end, each number once per epoch. All processes draw the same batches."""
    while True:
        yield from generator.permutation(numbers)[: len(numbers) // size * size].reshape(-1, size)


def make_layers(key: jax.Array, sizes: tuple[int, ...]) -> Layers:
    initial = jax.nn.initializers.he_uniform()
    layers = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    return [{"w": initial(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in layers]


def evaluate(layers: Layers, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross entropy and the accuracy over the whole batch: over the parts of all processes."""
    x, digits, weights = batch
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ layers[-1]["w"] + layers[-1]["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, digits)
    right = jnp.argmax(logits, axis=1) == digits
    return jnp.sum(weights * losses) / jnp.sum(weights), jnp.sum(weights * right) / jnp.sum(weights)


def parse_options(images: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images of all processes (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="units of a hidden layer (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate at the start (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for parameters and batches (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1 or not 1 <= options.batch <= images:
        parser.error(f"--steps must be at least 1, and --batch from 1 to {images}")
    return options


def main() -> None:
    images, digits = load_digits(return_X_y=True)
    images, digits = (images / 16).astype(np.float32), digits.astype(np.int32)
    options = parse_options(len(images) - TESTED)
    generator = np.random.default_rng(options.seed)
    for_test, for_training = np.split(generator.permutation(len(images)), [TESTED])
    test, training = (make_batch(images, digits, numbers) for numbers in (for_test, for_training))

    optimizer = optax.sgd(optax.cosine_decay_schedule(options.rate, options.steps), momentum=0.9)
    measure = jax.jit(evaluate, out_shardings=REPLICATED)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=REPLICATED)
    def step(layers: Layers, state: optax.OptState, batch: Batch) -> tuple[Layers, optax.OptState]:
        gradient, _ = jax.grad(evaluate, has_aux=True)(layers, batch)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(layers, updates), state

    sizes = (PIXELS, options.hidden, options.hidden, CLASSES)
    key = jax.random.key(options.seed)
    layers = jax.jit(make_layers, static_argnums=1, out_shardings=REPLICATED)(key, sizes)
    state = jax.jit(optimizer.init, out_shardings=REPLICATED)(layers)
    batches, done, times = draw(for_training, options.batch, generator), 0, []
    for stop in np.linspace(0, options.steps, min(REPORTS, options.steps) + 1).astype(int)[1:].tolist():
        begin = time.perf_counter()
        for _ in range(stop - done):
            layers, state = step(layers, state, make_batch(images, digits, next(batches)))
        jax.block_until_ready(layers)
        times.append((time.perf_counter() - begin) / (stop - done))
        done = stop
        # All processes must take part in this computation, though one alone prints the result.
        (loss, _), (_, accuracy) = measure(layers, training), measure(layers, test)
        line = f"step {done:5}: loss {float(loss):.5f}, test accuracy {float(accuracy):.4f}"
        if jax.process_index() == 0:
            print(line, flush=True)
    if jax.process_index() == 0:
        print(f"{1e3 * np.median(times):.3g} ms per step, processes: {jax.process_count()}")


if __name__ == "__main__":
    main()
