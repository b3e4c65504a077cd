"""Fourier transforms of arrays that are divided among ranks by a `jaxmpi.Grid`.

    transform = jaxmpi.fft.Transform(grid)
    spectrum = transform.forward(x)  # this rank's block by transform.spectral_grid
    x = transform.backward(spectrum)

A transform along an axis needs the whole axis on one rank. So a transform in several dimensions transforms along the
axes that are whole, makes the other axes whole by `jaxmpi.redistribute`, and continues. Slabs, where one axis is cut,
need one redistribution, pencils two. Local transforms are `jax.numpy.fft` and `jax.scipy.fft`. All functions can be
differentiated, batched and compiled. All ranks of the grid call them.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.fft
import numpy as np

from jaxmpi._grid import arguments as checks
from jaxmpi._grid.grid import Grid
from jaxmpi._grid.redistribute import redistribute
from jaxmpi._mpi.communicators import Local
from jaxmpi._primitive import arguments

__all__ = ["Transform", "dctn", "dstn", "fftn", "idctn", "idstn", "ifftn", "irfftn", "rfftn"]

_TRANSFORMED = ("float32", "float64", "complex64", "complex128")

_KINDS = ("fft", "dct", "dst")

_NORMS = (None, "backward", "ortho", "forward")


@dataclass(frozen=True)
class _Step:
    """A part of `forward`: a redistribution, if the grids differ, then local transforms.

    Local transforms are fast along axes that lie last in memory. So arrays travel in the order in which the axes of the
    next transform are the last ones, which a redistribution writes at no further cost. An order names the axes of the
    grid as they lie in memory, the first one outermost."""

    source: Grid
    source_order: tuple[int, ...]
    target: Grid
    order: tuple[int, ...]
    axes: tuple[int, ...]
    """The axes of the grid along which the local transforms go: the last ones of `order`, in the same order."""
    result: Grid
    """The division after the local transforms, which along these axes has as many cells as there are modes."""


class Transform(Local):
    """A Fourier, cosine or sine transform of arrays divided by a grid, and its inverse.

    The spectrum stays in the division of the last step, `spectral_grid`. Most programs do not care which division it
    is: they multiply by functions of `wavenumbers()` and transform back.

    Args:
      grid: the division of the arrays in physical space. The last axes of an array are the axes of the grid. Axes in
        front are a batch, which travels in the same messages.
      axes: the axes of the grid along which arrays are transformed. None: all.
      real: the arrays are real. Along the last of `axes`, with n points, the spectrum has n // 2 + 1 modes, as by
        `numpy.fft.rfftn`.
      norm: as in `numpy.fft` and `scipy.fft`: "backward" (the meaning of None), "ortho" or "forward".
      kind: "fft"; or "dct" or "dst" along axes between walls, for the cosine or sine transform of type 2, whose inverse
        has type 3 (`scipy.fft.dct`, `scipy.fft.dst`). They are for values at the middles of cells, with no slope, or no
        value, at the walls. One for all, or one for each of `axes`.
      pad: the ratio of points to modes along each of `axes`, for example 3/2 for products without aliasing. One number,
        or one for each of `axes`. `grid` is then the division of the modes, and `physical_grid` the division of the
        arrays, whose numbers of points are rounded up. Modes beyond `grid` are dropped by `forward` and are zero in
        `backward`. Along an axis with more points than modes, the same holds for mode -n/2, which an even number of
        modes has without a partner. Axes with a cosine or sine transform are not padded.
      natural: the spectrum is divided by the same numbers of processes as the arrays. This takes one more
        redistribution each way.

    Raises:
      ValueError: an axis twice, or one that the grid does not have. A grid without a shape. Another `norm` or `kind`. A
        `pad` below 1. `real` or `pad` where an axis has a cosine or sine transform. A single axis that is cut, because
        it cannot be made whole. On this rank; nothing is sent.
      TypeError: an argument is of the wrong type. On this rank; nothing is sent.
    """

    _function = "Transform"
    """The name of the function that the user has called."""

    def __init__(
        self,
        grid: Grid,
        axes: Sequence[int] | int | None = None,
        *,
        real: bool = False,
        norm: str | None = None,
        kind: str | Sequence[str] = "fft",
        pad: float | Sequence[float] | None = None,
        natural: bool = False,
    ):
        function = self._function
        if not isinstance(grid, Grid):
            raise TypeError(f"{function}: grid must be a jaxmpi.Grid, got {grid!r:.80} of {type(grid).__name__}.")
        grid._need_shape(function)
        grid._check_alive(function)
        for name, value in (("real", real), ("natural", natural)):
            checks.truth(value, function, name)
        if norm not in _NORMS:
            raise ValueError(f"{function}: norm is {norm!r}. Possible are None, 'backward', 'ortho' and 'forward'.")
        self._axes = _axes_of(grid, axes, function)
        self._norm = norm or "backward"
        self._kinds: dict[int, str] = dict(zip(self._axes, _each(kind, len(self._axes), function, "kind"), strict=True))
        if not all(isinstance(name, str) and name in _KINDS for name in self._kinds.values()):
            raise ValueError(f"{function}: kind is {kind!r}. Pass 'fft', 'dct' or 'dst', or one of them for each axis.")
        self._halved = self._axes[-1] if real else None
        """The axis along which the arrays are real and the spectrum has half of the modes. None: no axis."""
        factors = _factors(pad, len(self._axes))
        for axis, factor in zip(self._axes, factors, strict=True):
            if self._kinds[axis] != "fft" and (factor > 1 or axis == self._halved):
                raise ValueError(
                    f"{function}: {'pad' if factor > 1 else 'real'} is for Fourier transforms, and axis {axis} has a "
                    f"{self._kinds[axis]!r}. "
                    + ("Pass 1 for it." if factor > 1 else "Name an axis with an 'fft' last, or leave real out.")
                )
        self._sizes = {axis: grid.global_shape[axis] for axis in self._axes}
        """The numbers of modes along each axis. `real` keeps about half of the modes along the last one."""
        if 0 in self._sizes.values():
            raise ValueError(
                f"{function}: the grid has shape {grid.global_shape}. An axis without cells has no transform."
            )
        wished = zip(self._sizes.items(), factors, strict=True)
        self._points = {axis: math.ceil(n * f - 1e-9) for (axis, n), f in wished}  # 1.1 is a little more than 11 / 10
        self._padded = pad is not None
        self.grid = grid
        """The division of arrays without padding."""
        self.physical_grid = _resized(grid, self._points)
        """The division of the arrays that `forward` takes and `backward` returns. Without padding this is `grid`."""
        self._natural = tuple(range(len(grid.processes)))
        self._steps = self._plan(function)
        self._last = self._steps[-1].result
        sizes = {axis: self._modes(axis) for axis in self._axes}
        self.spectral_grid = _resized(grid, sizes) if natural else self._last
        """The division of the spectrum."""

    def __repr__(self) -> str:
        real = "" if self._halved is None else ", real"
        kinds = "" if {*self._kinds.values()} == {"fft"} else f", {', '.join(self._kinds.values())}"
        return f"Transform({self.physical_grid}, axes {self._axes}{kinds}{real}, spectrum in {self.spectral_grid})"

    def _modes(self, axis: int) -> int:
        """Return the number of modes of the spectrum along an axis."""
        return self._sizes[axis] // 2 + 1 if axis == self._halved else self._sizes[axis]

    def _plan(self, function: str) -> list[_Step]:
        now, left = self.physical_grid, list(self._axes)
        order = self._natural
        steps: list[_Step] = []
        while left:
            # Of real arrays the last axis is transformed first, alone or with others that are whole.
            first = self._halved is not None and not steps
            needed = left[-1:] if first else [axis for axis in left if now.processes[axis] == 1]
            source = target = now
            if not needed or now.processes[needed[0]] > 1:
                if len(now.processes) == 1:
                    raise ValueError(
                        f"{function}: a grid of one axis that is cut among {now.processes[0]} processes cannot be "
                        "transformed along it, because no other axis can be cut instead. Use two axes or more."
                    )
                # Choose the pencil that makes the most axes whole at once, and of several the last one.
                possible = map(now.pencil, needed or left[::-1])
                target = max(possible, key=lambda grid: sum(grid.processes[axis] == 1 for axis in left))
            # The axis with half of the modes lies last, because real transforms halve the last axis.
            whole = tuple(axis for axis in order if axis in left and target.processes[axis] == 1)
            if self._halved in whole:
                whole = (*(axis for axis in whole if axis != self._halved), self._halved)
            now = _resized(target, {axis: self._modes(axis) for axis in whole})
            new = (*(axis for axis in order if axis not in whole), *whole)
            steps.append(_Step(source, order, target, new, whole, now))
            order = new
            left = [axis for axis in left if axis not in whole]
        return steps

    # --- transforms ------------------------------------------------------------------------------------------------

    def forward(self, x: Any) -> Any:
        """Transform to the spectrum.

        Args:
          x: this rank's block by `physical_grid`, with any axes in front; or a pytree of blocks, which travel in the
            same messages. Real or complex; with `real` it must be real. Integers become floating-point numbers.

        Returns:
          This rank's block of the spectrum by `spectral_grid`, complex, of the precision of `x`. Without a Fourier
          transform along any axis it is real if `x` is.

        Raises:
          ValueError: a block does not fit the grid. While tracing, before anything is sent; other ranks then wait.
          TypeError: complex numbers for a real transform, or no array. At the same time.
        """
        return self._forward(x, "Transform.forward", "x")

    def _forward(self, x: Any, function: str, argument: str) -> Any:
        arrays, structure = self._checked(x, self.physical_grid, function, argument, self._halved is not None)
        for step in self._steps:
            arrays = _moved(arrays, step.source, step.source_order, step.target, step.order)
            arrays = [self._to_modes(array, step) for array in arrays]
        arrays = _moved(arrays, self._last, self._steps[-1].order, self.spectral_grid, self._natural)
        return jax.tree.unflatten(structure, arrays)

    def backward(self, y: Any) -> Any:
        """Transform back from the spectrum.

        Args:
          y: this rank's block of a spectrum by `spectral_grid`, as `forward` returns it; or a pytree of blocks.

        Returns:
          This rank's block by `physical_grid`. It is real with `real`, and also without a Fourier transform along any
          axis if `y` is real. Otherwise it is complex.

        It raises the errors of `forward`.
        """
        return self._backward(y, "Transform.backward", "y")

    def _backward(self, y: Any, function: str, argument: str) -> Any:
        arrays, structure = self._checked(y, self.spectral_grid, function, argument, False)
        arrays = _moved(arrays, self.spectral_grid, self._natural, self._last, self._steps[-1].order)
        for step in self._steps[::-1]:
            arrays = [self._to_points(array, step) for array in arrays]
            arrays = _moved(arrays, step.target, step.order, step.source, step.source_order)
        return jax.tree.unflatten(structure, arrays)

    def wavenumbers(self, lengths: Sequence[float] | float | None = None) -> tuple[np.ndarray, ...]:
        """Return the wavenumbers of this rank's part of the spectrum, along each of the transformed axes.

        Args:
          lengths: the length of the domain along each of the axes, or one for all. The result is 2 pi k / length. None:
            k itself, whole numbers, as from `numpy.fft.fftfreq(n, 1 / n)`. For cosine and sine transforms the result is
            pi k / length, where k counts half waves: 0 to n - 1 for "dct", 1 to n for "dst".

        Returns:
          An array of float64 for each transformed axis, of shape (..., n, ...). The axis of the grid has size n, the
          others size 1, so that the array broadcasts against this rank's block of the spectrum.
        """
        scales = [None] * len(self._axes) if lengths is None else _lengths(lengths, len(self._axes))
        wavenumbers = []
        for axis, length in zip(self._axes, scales, strict=True):
            n = self._sizes[axis]
            k = np.fft.rfftfreq(n, 1 / n) if axis == self._halved else np.fft.fftfreq(n, 1 / n)
            turn = 2 * np.pi
            if self._kinds[axis] != "fft":
                k, turn = np.arange(n) + (1.0 if self._kinds[axis] == "dst" else 0.0), np.pi
            k = k[self.spectral_grid.slices[axis]] * (1.0 if length is None else turn / length)
            shape = [1] * len(self.grid.processes)
            shape[axis] = -1
            wavenumbers.append(k.reshape(shape))
        return tuple(wavenumbers)

    # --- on one rank -----------------------------------------------------------------------------------------------

    def _checked(self, x: Any, grid: Grid, function: str, argument: str, real: bool) -> tuple[list[Any], Any]:
        grid._check_alive(function)
        leaves, names, structure = arguments.leaves(x, function, argument)
        for leaf, name in zip(leaves, names, strict=True):
            if leaf.shape[max(leaf.ndim - len(grid.processes), 0) :] != grid.local_shape:
                raise ValueError(
                    f"{function}: {name} has shape {leaf.shape}. It must end with {grid.local_shape}, this rank's "
                    f"block of {grid}."
                )
            whole = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)
            if leaf.dtype.name not in _TRANSFORMED and not whole:
                raise TypeError(
                    f"{function}: {name} has dtype {leaf.dtype}, which has no Fourier transform. Convert it first, "
                    "for example by x.astype('float32')."
                )
            if real and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise TypeError(
                    f"{function}: {name} has dtype {leaf.dtype}, but this is a transform of real arrays. Pass the "
                    "real part, or use fftn, or a Transform without real=True."
                )
        # Convert here, because a rank without cells does no local transforms, which would convert.
        return [x if x.dtype.name in _TRANSFORMED else x.astype(float) for x in leaves], structure

    def _to_modes(self, x: jax.Array, step: _Step) -> jax.Array:
        """Do the local transforms of a step."""
        waves = [axis for axis in step.axes if self._kinds[axis] == "fft"]
        if x.size == 0 or 0 in step.result.local_shape:
            return _empty(x, step.result, step.order, bool(waves))
        real = self._halved in waves
        for axes in _together(waves):
            places = _places(axes, step.order)
            transform = jnp.fft.rfftn if real and axes[-1] == self._halved else jnp.fft.fftn
            x = transform(x, axes=places, norm=self._local_norm)
            for axis, place in zip(axes, places, strict=True):
                x = self._cut(x, axis, place)
        for axis, place in zip(step.axes, _places(step.axes, step.order), strict=True):
            if axis not in waves:
                x = _half_waves(x, self._kinds[axis], place, self._norm, False)
        return x

    def _to_points(self, y: jax.Array, step: _Step) -> jax.Array:
        """Do the inverse of `_to_modes`."""
        waves = [axis for axis in step.axes if self._kinds[axis] == "fft"]
        real = self._halved in waves
        if y.size == 0 or 0 in step.target.local_shape:
            y = _empty(y, step.target, step.order, bool(waves))
            return y.real if real else y
        for axis, place in zip(step.axes, _places(step.axes, step.order), strict=True):
            if axis not in waves:
                y = _half_waves(y, self._kinds[axis], place, self._norm, True)
        for axes in _together(waves)[::-1]:
            places = _places(axes, step.order)
            for axis, place in zip(axes, places, strict=True):
                y = self._widen(y, axis, place)
            if real and axes[-1] == self._halved:
                y = jnp.fft.irfftn(y, [self._points[axis] for axis in axes], places, norm=self._local_norm)
            else:
                y = jnp.fft.ifftn(y, axes=places, norm=self._local_norm)
        return y

    @property
    def _local_norm(self) -> str:
        """The norm of the local transforms. With more points than modes they compute amplitudes, which do not depend
        on the number of points."""
        return "forward" if self._padded else self._norm

    def _scale(self, axis: int) -> float:
        """Return the factor between an amplitude and the mode in a spectrum."""
        return self._sizes[axis] ** {"backward": 1.0, "ortho": 0.5, "forward": 0.0}[self._norm]

    def _cut(self, x: jax.Array, axis: int, place: int) -> jax.Array:
        """Keep the modes of the grid from a padded transform, along an axis, which lies at `place`."""
        if not self._padded:
            return x
        place, n = place % x.ndim, self._sizes[axis]
        if self._points[axis] > n:
            parts = [jax.lax.slice_in_dim(x, 0, (n + 1) // 2, axis=place)]
            if n % 2 == 0:  # the mode without partner
                parts.append(jnp.zeros_like(jax.lax.slice_in_dim(x, 0, 1, axis=place)))
            if axis != self._halved:
                end = x.shape[place]
                parts.append(jax.lax.slice_in_dim(x, end - (n - 1) // 2, end, axis=place))
            x = jnp.concatenate(parts, place)
        return x * self._scale(axis)

    def _widen(self, y: jax.Array, axis: int, place: int) -> jax.Array:
        """Add zero modes along an axis, which lies at `place`, up to the modes of a padded transform."""
        if not self._padded:
            return y
        place, n, points = place % y.ndim, self._sizes[axis], self._points[axis]
        if points > n:
            most, negative = (points // 2 + 1, 0) if axis == self._halved else (points, (n - 1) // 2)
            positive = (n + 1) // 2
            shape = list(y.shape)
            shape[place] = most - positive - negative
            parts = [jax.lax.slice_in_dim(y, 0, positive, axis=place), jnp.zeros(shape, y.dtype)]
            if negative:
                parts.append(jax.lax.slice_in_dim(y, n - negative, n, axis=place))
            y = jnp.concatenate(parts, place)
        return y / self._scale(axis)


def _places(axes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return where axes of the grid lie in arrays of this order, from the end."""
    return [order.index(axis) - len(order) for axis in axes]


def _moved(
    arrays: list[Any], source: Grid, order: tuple[int, ...], target: Grid, target_order: tuple[int, ...]
) -> list[Any]:
    """Return blocks in another order, and of another division unless it is the same."""
    if source is target and order == target_order:
        return arrays
    here, there = (_places(range(len(order)), each) for each in (order, target_order))
    if source is target:
        return [jnp.moveaxis(x, here, there) for x in arrays]
    return redistribute(arrays, source, target, axes=here, target_axes=there)


def _half_waves(x: jax.Array, kind: str, axis: int, norm: str, inverse: bool) -> jax.Array:
    """Compute the local cosine or sine transform of type 2 along an axis, or the inverse.

    Mode k of the sine transform of x is mode n - 1 - k of the cosine transform of x' with x'_j = (-1)^j x_j."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):  # older versions of JAX would take the real part alone
        return jax.lax.complex(*(_half_waves(part, kind, axis, norm, inverse) for part in (x.real, x.imag)))
    n = x.shape[axis]
    shape = [1] * x.ndim
    shape[axis] = n
    signs = jnp.asarray(np.where(np.arange(n) % 2, -1, 1).reshape(shape), x.dtype)
    if kind == "dst":
        x = jnp.flip(x, axis) if inverse else x * signs
    local = jax.scipy.fft.idct if inverse else jax.scipy.fft.dct
    x = local(x, axis=axis, norm="ortho" if norm == "ortho" else None)
    if kind == "dst":
        x = x * signs if inverse else jnp.flip(x, axis)
    if norm == "forward":
        x = x * (2 * n) if inverse else x / (2 * n)
    return x


def _empty(x: jax.Array, grid: Grid, order: Sequence[int], waves: bool) -> jax.Array:
    """Return a block without cells of another division, complex after a Fourier transform, because JAX has no
    transforms of an empty block. It depends on `x`, so that it is mapped and differentiated as on other ranks."""
    if waves:
        x = x.astype(np.result_type(x.dtype, np.complex64))
    front = x.ndim - len(order)
    sizes = (*x.shape[:front], *(grid.local_shape[axis] for axis in order))
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, new - old, 0) for new, old in zip(sizes, x.shape, strict=True)])


def _together(axes: Sequence[int]) -> list[Sequence[int]]:
    """Return groups of axes that one transform of JAX takes, three at most, the last ones first."""
    return [axes[max(end - 3, 0) : end] for end in range(len(axes), 0, -3)]


def _resized(grid: Grid, sizes: dict[int, int]) -> Grid:
    """Return the grid with other numbers of cells along some axes, or the same grid if the numbers are the same."""
    if all(grid.global_shape[axis] == size for axis, size in sizes.items()):
        return grid
    shape: list[Any] = list(grid._layout.blocks)
    for axis, size in sizes.items():
        shape[axis] = size
    return grid._like(grid.processes, shape)


def _axes_of(grid: Grid, axes: Sequence[int] | int | None, function: str) -> tuple[int, ...]:
    """Return axes of the grid, from the front, each once."""
    dimensions = len(grid.processes)
    listed = range(dimensions) if axes is None else checks.axes(axes, function)
    checked = [checks.axis(axis, dimensions, function) for axis in listed]
    if not checked or len(set(checked)) < len(checked):
        raise ValueError(f"{function}: axes is {axes}. Pass axes of the grid, each of them once.")
    return tuple(checked)


def _each(values: Any, count: int, function: str, what: str) -> list[Any]:
    listed = list(values) if checks.is_listed(values) else [values] * count
    if len(listed) != count:
        raise ValueError(f"{function}: {what} is {values!r}. Pass one for all, or one for each of {count} axes.")
    return listed


def _lengths(lengths: Any, count: int) -> list[float]:
    listed = _each(lengths, count, "Transform.wavenumbers", "lengths")
    with contextlib.suppress(TypeError, ValueError):  # not a number, or a traced value
        numbers = [float(length) for length in listed if not isinstance(length, str)]
        if len(numbers) == count and all(0 < length < math.inf for length in numbers):
            return numbers
    raise ValueError(
        f"Transform.wavenumbers: lengths is {lengths!r}. Pass a positive number that is not traced, or one for each "
        "axis."
    )


def _factors(pad: Any, count: int) -> list[float]:
    factors = _each(1 if pad is None else pad, count, "Transform", "pad")
    for factor in factors:
        is_number = isinstance(factor, int | float | np.integer | np.floating) and not isinstance(factor, bool)
        if not is_number or not 1 <= factor < math.inf:
            raise ValueError(
                f"Transform: pad is {pad!r}. Pass a Python or NumPy number from 1 on, such as 3/2, or one for each "
                "axis."
            )
    return factors


# --- single calls ----------------------------------------------------------------------------------------------------


def _single(
    function: str, grid: Grid, axes: Sequence[int] | int | None, real: bool, norm: str | None, kind: str = "fft"
) -> Transform:
    transform = object.__new__(Transform)
    transform._function = function
    transform.__init__(grid, axes, real=real, norm=norm, kind=kind, natural=True)  # type: ignore[misc]
    return transform


def _single_half_waves(
    function: str, x: Any, grid: Grid, axes: Any, type: int, norm: str | None, kind: str, inverse: bool
) -> Any:
    """Transform with type 2 or 3. Type 3 is the inverse of type 2 with the opposite norm."""
    if arguments.integer(type, function, "type") not in (2, 3):
        raise ValueError(f"{function}: type is {type}. Possible are 2, and 3, the inverse of 2 but for its norm.")
    opposite = {None: "forward", "backward": "forward", "forward": "backward"}
    transform = _single(function, grid, axes, False, opposite.get(norm, norm) if type == 3 else norm, kind)
    return (transform._backward if inverse == (type == 2) else transform._forward)(x, function, "x")


def _documented(text: str, more: str = "") -> Callable[..., Any]:
    def document(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__doc__ = f"""{text}

    Arrays and spectrum are divided by the same numbers of processes. A program with many transforms saves a
    redistribution each way if it uses a `Transform`, which leaves the spectrum in the division of the last step.

    Args:
      x: this rank's block, with any axes in front; or a pytree of blocks.
      grid: the division of the array in physical space.
      axes, norm: as in `Transform`.{more}

    Returns:
      This rank's block of the result: by `Transform(grid, axes, natural=True).spectral_grid`, or by `grid`.

    It raises the errors of `Transform` and its methods.
    """
        return function

    return document


@_documented("The Fourier transform of a complex or real array that is divided by a grid (`numpy.fft.fftn`).")
def fftn(x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, norm: str | None = None) -> Any:
    return _single("fftn", grid, axes, False, norm)._forward(x, "fftn", "x")


@_documented("The inverse Fourier transform of a spectrum as `fftn` returns it (`numpy.fft.ifftn`).")
def ifftn(x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, norm: str | None = None) -> Any:
    return _single("ifftn", grid, axes, False, norm)._backward(x, "ifftn", "x")


@_documented("The Fourier transform of a real array that is divided by a grid (`numpy.fft.rfftn`).")
def rfftn(x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, norm: str | None = None) -> Any:
    return _single("rfftn", grid, axes, True, norm)._forward(x, "rfftn", "x")


@_documented("The inverse of `rfftn`: a real array from a spectrum (`numpy.fft.irfftn`). `grid` divides the array.")
def irfftn(x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, norm: str | None = None) -> Any:
    return _single("irfftn", grid, axes, True, norm)._backward(x, "irfftn", "x")


_TYPE = """
      type: 2 or 3, as in `scipy.fft`."""


@_documented("The cosine transform of an array that is divided by a grid (`scipy.fft.dctn`).", _TYPE)
def dctn(x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, type: int = 2, norm: str | None = None) -> Any:
    return _single_half_waves("dctn", x, grid, axes, type, norm, "dct", False)


@_documented("The inverse of `dctn` of the same type (`scipy.fft.idctn`).", _TYPE)
def idctn(
    x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, type: int = 2, norm: str | None = None
) -> Any:
    return _single_half_waves("idctn", x, grid, axes, type, norm, "dct", True)


@_documented("The sine transform of an array that is divided by a grid (`scipy.fft.dstn`).", _TYPE)
def dstn(x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, type: int = 2, norm: str | None = None) -> Any:
    return _single_half_waves("dstn", x, grid, axes, type, norm, "dst", False)


@_documented("The inverse of `dstn` of the same type (`scipy.fft.idstn`).", _TYPE)
def idstn(
    x: Any, grid: Grid, axes: Sequence[int] | int | None = None, *, type: int = 2, norm: str | None = None
) -> Any:
    return _single_half_waves("idstn", x, grid, axes, type, norm, "dst", True)
