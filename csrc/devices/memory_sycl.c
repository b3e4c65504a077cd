/* Intel's devices. What is missing here is the one thing that plain C cannot do.
 *
 * XLA hands over the stream as a pointer to a sycl::queue, a C++ object. Copies in its order, and a host function in
 * it, are member functions and templates of the C++ library; they have no C entry points, and their mangled names and
 * the layout of their arguments belong to one release of the compiler. Level Zero has a C interface and could copy, but
 * not in the order of a queue that it does not know: the command list behind the queue is given out by a C++ template
 * alone (sycl::get_native). A file of C++ with twenty functions, built where the compiler is, would fill the structure
 * below; nothing else would have to change.
 */
#include "devices/memory.h"

#define SPACE sycl
#include "xla/handlers.h"

const struct memory memory_sycl = {
    .platform = "SYCL",
    .handlers = handlers,
    .absent = "not supported: XLA's stream for Intel's devices is a C++ object, which this build cannot use",
};
