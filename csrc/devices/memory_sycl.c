/* Intel's devices: not supported, because plain C cannot use XLA's stream for them.
 *
 * XLA passes the stream as a pointer to a sycl::queue, a C++ object. Copies and host functions in the order of the
 * queue are member functions and templates of the C++ library. They have no C entry points, and their mangled names and
 * the layout of their arguments belong to one release of the compiler. Level Zero has a C API and could copy, but not
 * in the order of a queue that it does not know: only a C++ template returns the command list behind the queue
 * (sycl::get_native). A C++ library with twenty functions that C can call, built where the compiler is available and
 * loaded like a driver, could fill the structure below. Nothing else in the core would have to change.
 */
#include "devices/spaces.h"

#define MEMORY memory_sycl
#include "execute/handlers.h"

const struct memory memory_sycl = {
    .platform = "SYCL",
    .handlers = handlers,
    .absent = "not supported: XLA's stream for Intel's devices is a C++ object, which this build cannot use",
};
