#include "core/box.h"

#include <complex.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/combine.h"
#include "base/ffi.h"
#include "base/float16.h"

/* --- copies ---
 *
 * A row has `count` parts. Part i begins `stride` bytes times the place behind `at`. */

enum places { IN_ORDER, NARROW, WIDE };
struct row {
  char *at;
  int64_t stride;
  enum places places;
  const void *list;
};

#define INLINE static inline __attribute__((always_inline))

enum { CACHE_LINE = 64, PAGE = 4096 };

INLINE char *part_of(const struct row *row, int64_t i) {
  int64_t place = row->places == NARROW ? ((const int32_t *)row->list)[i]
                  : row->places == WIDE ? ((const int64_t *)row->list)[i]
                                        : i;
  return row->at + place * row->stride;
}

/* If the compiler knows the size, a copy is a few instructions. */
#define WITH_RUN(run, COPY) \
  switch (run) {            \
    case 1:                 \
      COPY(1)               \
    case 2:                 \
      COPY(2)               \
    case 4:                 \
      COPY(4)               \
    case 8:                 \
      COPY(8)               \
    case 16:                \
      COPY(16)              \
    case 32:                \
      COPY(32)              \
    case 64:                \
      COPY(64)              \
    default:                \
      COPY(run)             \
  }

INLINE void copy_runs(const struct row *to, const struct row *from, int64_t count, int64_t run) {
#define COPY(size)                                                                              \
  for (int64_t i = 0; i < count; i++) memcpy(part_of(to, i), part_of(from, i), (size_t)(size)); \
  break;
  WITH_RUN(run, COPY)
#undef COPY
}

/* Makes a loop for each way in which the parts of an array lie. */
#define WITH_PLACES(list, ROW) \
  if ((list) == NULL) {        \
    ROW(IN_ORDER);             \
  } else if (!(list)->wide) {  \
    ROW(NARROW);               \
  } else {                     \
    ROW(WIDE);                 \
  }

/* The row from part `first` on. */
static inline struct row row_of(const struct box *box, char *array, int64_t stride, enum places places, int64_t first) {
  if (places == IN_ORDER) return (struct row){array + first * stride, stride, places, NULL};
  const char *list = (const char *)box->list->values + first * (places == WIDE ? 8 : 4);
  return (struct row){array, stride, places, list};
}

/* A function for a row of a box's parts in an array; in the message the parts follow each other. */
typedef void row_function(const struct box *box, char *array, int64_t stride, int64_t count, char *message);

static void gather_parts(const struct box *box, char *array, int64_t stride, int64_t first, int64_t count,
                         char *message) {
  const struct row to = {message, box->run, IN_ORDER, NULL};
#define GATHER(places)                                               \
  const struct row from = row_of(box, array, stride, places, first); \
  copy_runs(&to, &from, count, box->run)
  WITH_PLACES(box->list, GATHER)
}

static void gather_row(const struct box *box, char *array, int64_t stride, int64_t count, char *message) {
  gather_parts(box, array, stride, 0, count, message);
}

static void scatter_row(const struct box *box, char *array, int64_t stride, int64_t count, char *message) {
  const struct row from = {message, box->run, IN_ORDER, NULL};
#define SCATTER(places)                                        \
  const struct row to = row_of(box, array, stride, places, 0); \
  copy_runs(&to, &from, count, box->run)
  WITH_PLACES(box->list, SCATTER)
}

/* There is no message. */
static void fill_row(const struct box *box, char *array, int64_t stride, int64_t count, char *message) {
  const int64_t width = sizeof box->value, run = box->run;
  (void)message;
  for (int64_t i = 0; i < count; i++) {
    char *part = array + (box->list != NULL ? index_at(box->list, i) : i) * stride;
    int64_t k = 0;
    for (; k + width <= run; k += width) memcpy(part + k, box->value, sizeof box->value);
    memcpy(part + k, box->value, (size_t)(run - k));
  }
}

static void walk_axis(row_function *function, const struct box *box, int axis, char *array, char **message) {
  if (axis + 1 >= box->axes) {
    int64_t count = box->axes > 0 ? box->counts[axis] : 1, stride = box->axes > 0 ? box->strides[axis] : 0;
    function(box, array, stride, count, *message);
    if (*message != NULL) *message += count * box->run;
    return;
  }
  for (int64_t i = 0; i < box->counts[axis]; i++)
    walk_axis(function, box, axis + 1, array + i * box->strides[axis], message);
}

static void walk_box(row_function *function, const struct box *box, const void *array, const char *message) {
  char *at = (char *)(uintptr_t)message;
  walk_axis(function, box, 0, (char *)(uintptr_t)array + box->first, &at);
}

#ifdef __SSE2__
enum { STREAMS_FROM = 8192, PIECE = 4096, UNIT = 16 };

bool box_streams(const struct box *box, int64_t message_bytes) {
  int64_t row = box->axes > 1 ? box->counts[box->axes - 1] * box->run : 0;
  return message_bytes > STREAMS_FROM && box->stage % UNIT == 0 && row % CACHE_LINE == 0 &&
         (box->run % UNIT == 0 || box->run <= PIECE / UNIT);
}

INLINE void stream(char *to, const char *from, int64_t bytes) {
  int64_t i = 0;
  for (; i + UNIT <= bytes; i += UNIT) _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
  memcpy(to + i, from + i, (size_t)(bytes - i));
}

/* Short parts are gathered in the cache first. */
static void stream_row(const struct box *box, char *array, int64_t stride, int64_t count, char *message) {
  const int64_t run = box->run;
  if (run >= CACHE_LINE && run % UNIT == 0) {
    for (int64_t i = 0; i < count; i++)
      stream(message + i * run, array + (box->list != NULL ? index_at(box->list, i) : i) * stride, run);
    return;
  }
  char piece[PIECE];
  const int64_t parts = PIECE / run / UNIT * UNIT;
  for (int64_t i = 0; i < count; i += parts) {
    const int64_t n = count - i < parts ? count - i : parts;
    gather_parts(box, array, stride, i, n, piece);
    stream(message + i * run, piece, n * run);
  }
}

static void walk_streaming(const struct box *box, const void *array, char *message) {
  walk_box(stream_row, box, array, message);
  _mm_sfence(); /* other cores see these stores before the stores that announce the message */
}
#else
bool box_streams(const struct box *box, int64_t message_bytes) {
  (void)box, (void)message_bytes;
  return false;
}

static void walk_streaming(const struct box *box, const void *array, char *message) {
  walk_box(gather_row, box, array, message);
}
#endif

/* --- boxes and boxes --- */

bool box_is_like(const struct box *a, const struct box *b) {
  bool same = a->run == b->run && a->axes == b->axes && a->list == NULL && b->list == NULL;
  for (int axis = 0; axis < a->axes && same; axis++) same = a->counts[axis] == b->counts[axis];
  return same;
}

/* The axis along which the parts of a box lie closest; -1: the box is one part. Parts of more than MOST bytes are
 * copied in the order of the box, because each fills much of a cache line. */
enum { MOST = 16 };
static int closest(const struct box *box) {
  int closest = box->axes - 1;
  for (int axis = box->axes - 2; axis >= 0 && box->run <= MOST; axis--)
    if (llabs(box->strides[axis]) < llabs(box->strides[closest])) closest = axis;
  return closest;
}

/* A copy between boxes with the same parts. `near_read`, `near_written`: the axis along which the parts lie closest. */
struct copy {
  const struct box *from, *to;
  int near_read, near_written;
};

/* Steps from a part to the next along two axes: `across` is the axis along which the parts that are written lie
 * closest, `along` the one of the parts that are read. */
struct steps {
  int64_t across, along;
};

INLINE void copy_tile(const char *read, struct steps from, char *written, struct steps to, int64_t across,
                      int64_t along, int64_t run) {
  for (int64_t i = 0; i < along; i++)
    for (int64_t j = 0; j < across; j++)
      memcpy(written + i * to.along + j * to.across, read + i * from.along + j * from.across, (size_t)run);
}

/* Transpose two axes, in tiles that fill cache lines on both sides. The tiles of a page are together, so that few pages
 * are read at a time, and what is written stays in the cache until its lines are full. */
INLINE void copy_tiles(const struct copy *copy, const char *read, char *written, int64_t run) {
  const int i = copy->near_read, j = copy->near_written;
  const struct steps from = {copy->from->strides[j], copy->from->strides[i]};
  const struct steps to = {copy->to->strides[j], copy->to->strides[i]};
  const int64_t along = copy->from->counts[i], across = copy->from->counts[j], tile = CACHE_LINE / run;
  for (int64_t page = 0, end; page < along; page = end) {
    end = along - page < PAGE / run ? along : page + PAGE / run;
    for (int64_t at = 0; at < across; at += tile)
      for (int64_t next = page; next < end; next += tile) {
        const char *source = read + at * from.across + next * from.along;
        char *dest = written + at * to.across + next * to.along;
        if (across - at >= tile && end - next >= tile)
          copy_tile(source, from, dest, to, tile, tile, run);
        else
          copy_tile(source, from, dest, to, across - at < tile ? across - at : tile,
                    end - next < tile ? end - next : tile, run);
      }
  }
}

static void copy_axes(const struct copy *copy, int axis, const char *read, char *written) {
  const struct box *from = copy->from, *to = copy->to;
  while (axis < from->axes && (axis == copy->near_read || axis == copy->near_written)) axis++;
  if (axis < from->axes) {
    for (int64_t i = 0; i < from->counts[axis]; i++)
      copy_axes(copy, axis + 1, read + i * from->strides[axis], written + i * to->strides[axis]);
    return;
  }
  const int near = copy->near_read;
  if (near == copy->near_written) {
    const struct row rows[] = {{written, near < 0 ? 0 : to->strides[near], IN_ORDER, NULL},
                               {(char *)(uintptr_t)read, near < 0 ? 0 : from->strides[near], IN_ORDER, NULL}};
    copy_runs(&rows[0], &rows[1], near < 0 ? 1 : from->counts[near], from->run);
    return;
  }
#define COPY(size)                       \
  copy_tiles(copy, read, written, size); \
  break;
  WITH_RUN(from->run, COPY)
#undef COPY
}

void box_copy(const struct box *from, const void *read, const struct box *to, void *written) {
  const struct copy copy = {from, to, closest(from), closest(to)};
  copy_axes(&copy, 0, (const char *)read + from->first, (char *)written + to->first);
}

/* Where the parts of a box lie in a message. */
static struct box in_message(const struct box *box) {
  struct box message = {.run = box->run, .axes = box->axes};
  int64_t stride = box->run;
  for (int axis = box->axes - 1; axis >= 0; axis--) {
    message.counts[axis] = box->counts[axis];
    message.strides[axis] = stride;
    stride *= box->counts[axis];
  }
  return message;
}

static bool is_transposed(const struct box *box) { return box->list == NULL && closest(box) != box->axes - 1; }

void box_gather(const struct box *box, const void *array, char *message, bool streams) {
  if (is_transposed(box)) {
    const struct box to = in_message(box);
    box_copy(box, array, &to, message);
  } else if (streams && box->streams) {
    walk_streaming(box, array, message);
  } else {
    walk_box(gather_row, box, array, message);
  }
}

void box_scatter(const struct box *box, void *array, const char *message) {
  if (is_transposed(box)) {
    const struct box from = in_message(box);
    box_copy(&from, message, box, array);
  } else {
    walk_box(scatter_row, box, array, message);
  }
}

void box_fill(const struct box *box, void *array) { walk_box(fill_row, box, array, NULL); }

/* --- combinations --- */

typedef float _Complex complex64;
typedef double _Complex complex128;

/* Combinations in the arithmetic of each type. Sums of integers are modulo a power of two. */
#define DIRECTLY(type, combine, x, y) (type)(combine(x, y))
#define FLOAT16(type, combine, x, y)  float16_from_float(combine(float16_to_float(x), float16_to_float(y)))
#define BFLOAT16(type, combine, x, y) bfloat16_from_float(combine(bfloat16_to_float(x), bfloat16_to_float(y)))
#define GREATER(a, b)                 ((a) > (b) ? (a) : (b)) /* of integers */
#define LESS(a, b)                    ((a) < (b) ? (a) : (b))

/* Neither the array nor the message need be aligned. */
#define COMBINER(name, type, ARITHMETIC, combine)                                                      \
  INLINE void name##_at(const struct row *row, int64_t count, int64_t run, const char *message) {      \
    for (int64_t i = 0; i < count; i++) {                                                              \
      char *part = part_of(row, i);                                                                    \
      for (int64_t k = 0; k < run; k += (int64_t)sizeof(type)) {                                       \
        type x, y;                                                                                     \
        memcpy(&x, part + k, sizeof x);                                                                \
        memcpy(&y, message + i * run + k, sizeof y);                                                   \
        x = ARITHMETIC(type, combine, x, y);                                                           \
        memcpy(part + k, &x, sizeof x);                                                                \
      }                                                                                                \
    }                                                                                                  \
  }                                                                                                    \
  static void name(const struct box *box, char *array, int64_t stride, int64_t count, char *message) { \
    const int64_t size = (int64_t)sizeof(type);                                                        \
    const enum places places = box->list == NULL ? IN_ORDER : box->list->wide ? WIDE : NARROW;         \
    const struct row row = row_of(box, array, stride, places, 0);                                      \
    if (box->run == size)                                                                              \
      name##_at(&row, count, size, message);                                                           \
    else                                                                                               \
      name##_at(&row, count, box->run, message);                                                       \
  }

COMBINER(sum_8, uint8_t, DIRECTLY, ADD) /* of signed integers, too: the bits are the same */
COMBINER(sum_16, uint16_t, DIRECTLY, ADD)
COMBINER(sum_32, uint32_t, DIRECTLY, ADD)
COMBINER(sum_64, uint64_t, DIRECTLY, ADD)
COMBINER(sum_float16, uint16_t, FLOAT16, ADD)
COMBINER(sum_bfloat16, uint16_t, BFLOAT16, ADD)
COMBINER(sum_float32, float, DIRECTLY, ADD)
COMBINER(sum_float64, double, DIRECTLY, ADD)
COMBINER(sum_complex64, complex64, DIRECTLY, ADD)
COMBINER(sum_complex128, complex128, DIRECTLY, ADD)

#define EXTREMA(name, type, ARITHMETIC, largest, smallest) \
  COMBINER(max_##name, type, ARITHMETIC, largest)          \
  COMBINER(min_##name, type, ARITHMETIC, smallest)
EXTREMA(int8, int8_t, DIRECTLY, GREATER, LESS)
EXTREMA(int16, int16_t, DIRECTLY, GREATER, LESS)
EXTREMA(int32, int32_t, DIRECTLY, GREATER, LESS)
EXTREMA(int64, int64_t, DIRECTLY, GREATER, LESS)
EXTREMA(uint8, uint8_t, DIRECTLY, GREATER, LESS)
EXTREMA(uint16, uint16_t, DIRECTLY, GREATER, LESS)
EXTREMA(uint32, uint32_t, DIRECTLY, GREATER, LESS)
EXTREMA(uint64, uint64_t, DIRECTLY, GREATER, LESS)
EXTREMA(float16, uint16_t, FLOAT16, LARGER, SMALLER)
EXTREMA(bfloat16, uint16_t, BFLOAT16, LARGER, SMALLER)
EXTREMA(float32, float, DIRECTLY, LARGER, SMALLER)
EXTREMA(float64, double, DIRECTLY, LARGER, SMALLER)

/* NULL: elements of this type cannot be combined by `how`. */
static row_function *combiner_of(enum combination how, const struct datatype *type) {
#define COMBINERS(code, sum, max, min) \
  case code:                           \
    return how == COMBINE_SUM ? sum : how == COMBINE_MAX ? max : how == COMBINE_MIN ? min : NULL;
  switch (type->code) {
    COMBINERS(FFI_DTYPE_PRED, NULL, max_uint8, min_uint8)
    COMBINERS(FFI_DTYPE_S8, sum_8, max_int8, min_int8)
    COMBINERS(FFI_DTYPE_S16, sum_16, max_int16, min_int16)
    COMBINERS(FFI_DTYPE_S32, sum_32, max_int32, min_int32)
    COMBINERS(FFI_DTYPE_S64, sum_64, max_int64, min_int64)
    COMBINERS(FFI_DTYPE_U8, sum_8, max_uint8, min_uint8)
    COMBINERS(FFI_DTYPE_U16, sum_16, max_uint16, min_uint16)
    COMBINERS(FFI_DTYPE_U32, sum_32, max_uint32, min_uint32)
    COMBINERS(FFI_DTYPE_U64, sum_64, max_uint64, min_uint64)
    COMBINERS(FFI_DTYPE_F16, sum_float16, max_float16, min_float16)
    COMBINERS(FFI_DTYPE_BF16, sum_bfloat16, max_bfloat16, min_bfloat16)
    COMBINERS(FFI_DTYPE_F32, sum_float32, max_float32, min_float32)
    COMBINERS(FFI_DTYPE_F64, sum_float64, max_float64, min_float64)
    COMBINERS(FFI_DTYPE_C64, sum_complex64, NULL, NULL)
    COMBINERS(FFI_DTYPE_C128, sum_complex128, NULL, NULL)
    default:
      return NULL;
  }
}

bool box_combines(enum combination how, const struct datatype *type) { return combiner_of(how, type) != NULL; }

void box_combine(const struct box *box, enum combination how, const struct datatype *type, void *array,
                 const char *message) {
  walk_box(combiner_of(how, type), box, array, message);
}
