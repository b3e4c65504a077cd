/* Boxes: the parts of an array that travel in a message of a plan, or are filled.
 *
 * Threads: pure functions, for any thread.
 */
#ifndef JAXMPI_BOX_H
#define JAXMPI_BOX_H

#include "core/indices.h"
#include "core/operation.h"

enum { MAX_BOX_AXES = 8 };

/* Equal parts of an array, `run` contiguous bytes each, which lie `stride` bytes apart along each axis: 0 or negative
 * strides are possible. With a list the parts along the last axis lie at the indices of the list, in units of the
 * stride. In a message the parts follow each other. */
struct box {
  int leaf, axes;
  const struct indices *list; /* as many indices as the last axis has parts; NULL: the parts are in order */
  bool streams;               /* may be gathered by stores that bypass the cache: see box_streams */
  int64_t stage;              /* offset in the stage of the plan */
  int64_t first;              /* offset in the array, of the part with index 0 along each axis */
  int64_t run;
  int64_t counts[MAX_BOX_AXES], strides[MAX_BOX_AXES]; /* the last axis varies fastest */
  unsigned char value[16];                             /* if the box is filled: the value of an element, repeated */
};

/* How a message changes the elements of a box: it replaces them, or it is combined with them. */
enum combination { COMBINE_NOT, COMBINE_SUM, COMBINE_MAX, COMBINE_MIN, COMBINATIONS };

/* Return whether elements of a type can be combined by `how`. */
bool box_combines(enum combination how, const struct datatype *type);

/* Return whether a box that is gathered at `stage` in a message of so many bytes may be gathered by stores that bypass
 * the cache. Another core reads a long message from the memory where it was composed. The cache lines stay in the cache
 * of that core. If the two cores share no cache, an ordinary store into that line waits until the other core has given
 * it up, which takes longer than the rest of an exchange. MPI libraries copy short messages at once, so these are
 * better in the cache. */
bool box_streams(const struct box *box, int64_t message_bytes);

/* Copy the parts of a box of an array to a message, or from a message; combine them with the message. `streams`: by
 * stores that bypass the cache, if the box allows it. */
void box_gather(const struct box *box, const void *array, char *message, bool streams);
void box_scatter(const struct box *box, void *array, const char *message);
void box_combine(const struct box *box, enum combination how, const struct datatype *type, void *array,
                 const char *message);

/* Repeat the box's value in all parts of the box. */
void box_fill(const struct box *box, void *array);

/* Return whether two boxes have the same parts, none by a list, so that the parts of one can be copied to the other. */
bool box_is_like(const struct box *box, const struct box *other);
void box_copy(const struct box *from, const void *read, const struct box *to, void *written);

#endif
