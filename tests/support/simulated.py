"""The suite on a simulated device, by `JAXMPI_TEST_DEVICE`: callback, flags, wait, aware, nccl, mixed or sycl.

With `mixed` NCCL carries what it can, too, and ranks of odd numbers have their arrays in CPU memory. With `sycl` the
device is Intel's, behind a fake libsycl, or behind the real one, if `JAXMPI_TEST_DRIVER` names the file in the folder
that tests/device/real_sycl.cpp becomes.

JAX computes on the CPU. Each operation's buffers are carried to the memory of a fake driver, which no host code can
touch, handed to the core's handler for devices on an asynchronous stream, and carried back. `JAXMPI_FAKE_DRIVERS` is
the folder of the libraries that tests/device/meson.build makes.
"""

import ctypes
import os
import sys
from pathlib import Path

TRANSPORT = os.environ.get("JAXMPI_TEST_DEVICE", "")
BY_NCCL = TRANSPORT in ("nccl", "mixed")
LEAVES = TRANSPORT in ("callback", "flags", "nccl")
"""Operations are left to the stream: their errors come later."""
TRANSPORTS = ("callback", "flags", "wait", "aware", "nccl", "mixed", "sycl")
PLATFORM = "ONEAPI" if TRANSPORT == "sycl" else "CUDA"


def begin() -> None:
    """Starts this process again with the fake libraries in reach of the loader. To be called before MPI is loaded."""
    if not TRANSPORT:
        return
    if "JAXMPI_SIMULATED" in os.environ:
        if BY_NCCL:  # also in a job, for which the launcher has set the CPU
            os.environ["JAX_PLATFORMS"] = ""
        return
    if TRANSPORT not in TRANSPORTS:
        raise ValueError(f"JAXMPI_TEST_DEVICE is {TRANSPORT}, not one of {', '.join(TRANSPORTS)}")
    folder = Path(os.environ["JAXMPI_FAKE_DRIVERS"])
    environment = {**os.environ, "JAXMPI_SIMULATED": "1", "JAXMPI_DEVICE_CHUNK": "4096"}
    environment["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    if BY_NCCL:  # JAX may use devices, of which there are NVIDIA's alone
        environment |= {"JAX_PLATFORMS": "", "HIP_VISIBLE_DEVICES": "-1"}
    if TRANSPORT == "sycl":
        named = [str(Path(__file__).parent / "plugin"), os.environ.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, named)), "JAXMPI_DEVICE_TRANSPORT": "wait"}
    elif TRANSPORT == "aware":
        environment["LD_PRELOAD"] = str(folder / "libaware.so")
    else:
        environment["JAXMPI_DEVICE_TRANSPORT"] = "nccl" if BY_NCCL else TRANSPORT
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


class Device:
    """The simulated device under the operations of this process.

    An error that the core defers is raised by its own operation, so that the suites need not know of it, unless
    `deferring`: then by the next one, as with XLA.
    """

    def __init__(self, deferring: bool = False) -> None:
        import jax

        from jaxmpi import _core
        from jaxmpi._mpi import library
        from jaxmpi._operations.table import OPERATIONS
        from jaxmpi._primitive import lowering

        assert library.DEVICES.aware == (TRANSPORT == "aware"), library.DEVICES
        transport = {"sycl": "wait"}.get(TRANSPORT, TRANSPORT)
        assert BY_NCCL or transport in (library.DEVICES.transport, "aware"), library.DEVICES
        assert library.DEVICES.nccl.version == 22809 * BY_NCCL, library.DEVICES
        folder = Path(os.environ["JAXMPI_FAKE_DRIVERS"])
        self._bridge = ctypes.CDLL(str(folder / "libbridge.so"))
        self._bridge.bridge_handler.restype = ctypes.c_void_p
        self._bridge.bridge_violation.restype = ctypes.c_char_p
        driver = "libsycl.so.9" if TRANSPORT == "sycl" else "libcuda.so.1"
        driver = os.environ.get("JAXMPI_TEST_DRIVER", driver)
        assert self._bridge.bridge_open(str(folder / driver).encode()) == 0
        address_of = ctypes.pythonapi.PyCapsule_GetPointer
        address_of.restype, address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        if TRANSPORT == "mixed" and library.MPI.COMM_WORLD.rank % 2 == 1:
            return
        for name, capsule in _core.handlers()[PLATFORM].items():
            if name == "check" and deferring:
                continue
            operation = name.encode()
            handler = ctypes.c_void_p(address_of(capsule, b"xla._CUSTOM_CALL_TARGET"))
            self._bridge.bridge_set(operation, handler)
            bridge = jax.ffi.pycapsule(ctypes.c_void_p(self._bridge.bridge_handler(operation)))
            stages = {"instantiate": bridge, "execute": bridge}
            jax.ffi.register_ffi_target(f"simulated_{name}", stages, platform="cpu")
        for operation in OPERATIONS:
            lowering.lower_to(operation, "simulated_{}", ("cpu",), on_device=True)

    def check(self) -> None:
        """Raises AssertionError if a rule of the driver was broken since the last check, or memory is left behind."""
        assert self._bridge.bridge_violations() == 0, self._bridge.bridge_violation().decode()
        assert self._bridge.bridge_live_device() == 0

    def end(self) -> None:
        """Raises AssertionError if the core has kept something of the driver's."""
        from jaxmpi import _start

        _start.finish()
        assert self._bridge.bridge_live() == 0
