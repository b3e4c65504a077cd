/* Plans of arrays on a device: copies of the driver compose and unpack the messages, box by box. So only the boxes
 * leave the device, and nothing else of the arrays is copied to the host.
 *
 * Pinned memory has the messages, as in plan.h, and behind them room for filled boxes and for one box that is combined
 * with a message: it is copied down, combined by a host function, and copied up again, before the next.
 *
 * Threads: as transport.h; each function enqueues work on the stream of the call and does not wait.
 */
#ifndef JAXMPI_BOXES_H
#define JAXMPI_BOXES_H

#include "core/plan.h"

/* Return whether this is possible, and costs less than copies of whole arrays, or runtime.copy_bytes is 0. */
bool boxes_serve(const struct call *call, const struct plan *plan);

/* Bytes of pinned memory. */
size_t boxes_room(const struct plan *plan);

/* Before the messages travel; and after that. `room` is the pinned memory, the buffers of the call are on the device.
 */
ffi_error *boxes_down(const struct call *call, const struct plan *plan, char *room);
ffi_error *boxes_up(const struct call *call, const struct plan *plan, char *room);

#endif
