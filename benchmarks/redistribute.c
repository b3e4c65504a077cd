/* What a redistribution is measured against: an array of floats in three dimensions, in blocks of the same size on a
 * grid of processes, becomes blocks on another grid, in two ways:
 *
 *   packed      boxes are packed into messages, which are taken apart as they come; what stays on a rank is copied
 *   alltoallw   one MPI_Alltoallw with MPI_Type_create_subarray on both sides
 *
 * Compiled by redistribute.py. */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

enum { AXES = 3, MOST_RANKS = 64 };

/* Cells of the global array, from `first` up to `end` along each axis. */
struct cells {
  int first[AXES], end[AXES];
};

struct layout {
  int processes[AXES];
  const int *shape;
};

static struct cells block_of(const struct layout *layout, int rank) {
  struct cells block;
  for (int axis = AXES - 1; axis >= 0; axis--) {
    int size = layout->shape[axis] / layout->processes[axis], at = rank % layout->processes[axis];
    rank /= layout->processes[axis];
    block.first[axis] = at * size, block.end[axis] = (at + 1) * size;
  }
  return block;
}

static struct cells common(struct cells a, struct cells b) {
  for (int axis = 0; axis < AXES; axis++) {
    if (b.first[axis] > a.first[axis]) a.first[axis] = b.first[axis];
    if (b.end[axis] < a.end[axis]) a.end[axis] = b.end[axis];
  }
  return a;
}

static size_t length(const struct cells *c, int axis) {
  return c->end[axis] > c->first[axis] ? (size_t)(c->end[axis] - c->first[axis]) : 0;
}
static size_t number(const struct cells *c) { return length(c, 0) * length(c, 1) * length(c, 2); }

/* A box in an array: where it begins, and elements from a row and from a plane to the next. */
struct box {
  float *data;
  size_t row, plane;
};

static struct box box_in(float *array, const struct cells *block, const struct cells *box) {
  size_t row = length(block, 2), plane = row * length(block, 1), at = (size_t)(box->first[2] - block->first[2]);
  at += (size_t)(box->first[1] - block->first[1]) * row + (size_t)(box->first[0] - block->first[0]) * plane;
  return (struct box){array + at, row, plane};
}

static void copy(struct box to, struct box from, const struct cells *c) {
  size_t planes = length(c, 0), rows = length(c, 1), run = length(c, 2);
  if (to.row == run && from.row == run) {
    run *= rows, rows = 1;
    if (to.plane == run && from.plane == run) run *= planes, planes = 1;
  }
  for (size_t i = 0; i < planes; i++)
    for (size_t j = 0; j < rows; j++)
      memcpy(to.data + i * to.plane + j * to.row, from.data + i * from.plane + j * from.row, run * sizeof(float));
}

/* From one layout to the other one. */
struct way {
  int size, rank;
  struct cells source, target, sent[MOST_RANKS], received[MOST_RANKS];
  float *out[MOST_RANKS], *in[MOST_RANKS];
  int counts[2][MOST_RANKS], places[MOST_RANKS];
  MPI_Datatype types[2][MOST_RANKS];
};

struct redistribution {
  int shape[AXES];
  struct way ways[2];
  float *arrays[2];
};

static float *room(const struct cells *c) { return aligned_alloc(64, (number(c) * sizeof(float) + 64) / 64 * 64); }

static MPI_Datatype subarray(const struct cells *block, const struct cells *box) {
  int sizes[AXES], counts[AXES], starts[AXES];
  MPI_Datatype type;
  for (int axis = 0; axis < AXES; axis++) {
    sizes[axis] = (int)length(block, axis), counts[axis] = (int)length(box, axis);
    starts[axis] = box->first[axis] - block->first[axis];
  }
  MPI_Type_create_subarray(AXES, sizes, counts, starts, MPI_ORDER_C, MPI_FLOAT, &type);
  MPI_Type_commit(&type);
  return type;
}

static void make(struct way *way, const struct layout *source, const struct layout *target) {
  MPI_Comm_rank(MPI_COMM_WORLD, &way->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &way->size);
  way->source = block_of(source, way->rank), way->target = block_of(target, way->rank);
  for (int r = 0; r < way->size; r++) {
    way->sent[r] = common(way->source, block_of(target, r));
    way->received[r] = common(way->target, block_of(source, r));
    const struct cells *blocks[] = {&way->source, &way->target}, *boxes[] = {&way->sent[r], &way->received[r]};
    for (int side = 0; side < 2; side++) {
      way->counts[side][r] = number(boxes[side]) > 0;
      way->types[side][r] = number(boxes[side]) > 0 ? subarray(blocks[side], boxes[side]) : MPI_FLOAT;
    }
    way->out[r] = room(&way->sent[r]), way->in[r] = room(&way->received[r]);
  }
}

/* Not freed: the program ends soon. */
struct redistribution *redistribution_make(const int *shape, const int *source, const int *target) {
  struct redistribution *r = calloc(1, sizeof *r);
  memcpy(r->shape, shape, sizeof r->shape);
  struct layout layouts[2] = {{.shape = r->shape}, {.shape = r->shape}};
  memcpy(layouts[0].processes, source, sizeof layouts[0].processes);
  memcpy(layouts[1].processes, target, sizeof layouts[1].processes);
  for (int i = 0; i < 2; i++) {
    make(&r->ways[i], &layouts[i], &layouts[1 - i]);
    r->arrays[i] = room(&r->ways[i].source);
  }
  return r;
}

/* The array of the source, which the caller fills and reads. */
float *redistribution_array(struct redistribution *r) { return r->arrays[0]; }

static void packed(struct way *way, float *from, float *to) {
  MPI_Request requests[2 * MOST_RANKS];
  int ranks[MOST_RANKS], receives = 0, sends = 0;
  for (int i = 1; i < way->size; i++) {
    int r = (way->rank + way->size - i) % way->size;
    size_t count = number(&way->received[r]);
    if (count == 0) continue;
    ranks[receives] = r;
    MPI_Irecv(way->in[r], (int)count, MPI_FLOAT, r, 1, MPI_COMM_WORLD, &requests[receives++]);
  }
  for (int i = 1; i < way->size; i++) {
    int r = (way->rank + i) % way->size;
    const struct cells *c = &way->sent[r];
    size_t count = number(c);
    if (count == 0) continue;
    copy((struct box){way->out[r], length(c, 2), length(c, 1) * length(c, 2)}, box_in(from, &way->source, c), c);
    MPI_Isend(way->out[r], (int)count, MPI_FLOAT, r, 1, MPI_COMM_WORLD, &requests[receives + sends++]);
  }
  const struct cells *own = &way->sent[way->rank];
  copy(box_in(to, &way->target, own), box_in(from, &way->source, own), own);
  for (int left = receives; left > 0; left--) {
    int i;
    MPI_Waitany(receives, requests, &i, MPI_STATUS_IGNORE);
    const struct cells *c = &way->received[ranks[i]];
    struct box message = {way->in[ranks[i]], length(c, 2), length(c, 1) * length(c, 2)};
    copy(box_in(to, &way->target, c), message, c);
  }
  MPI_Waitall(sends, requests + receives, MPI_STATUSES_IGNORE);
}

static void alltoallw(struct way *way, float *from, float *to) {
  MPI_Alltoallw(from, way->counts[0], way->places, way->types[0], to, way->counts[1], way->places, way->types[1],
                MPI_COMM_WORLD);
}

/* Steps: to the other layout, where the first plane is multiplied, and back. */
void redistribution_run(struct redistribution *r, int steps, float factor, int by_alltoallw) {
  void (*run)(struct way *, float *, float *) = by_alltoallw ? alltoallw : packed;
  const struct cells *block = &r->ways[1].source;
  size_t plane = length(block, 1) * length(block, 2);
  for (int s = 0; s < steps; s++) {
    run(&r->ways[0], r->arrays[0], r->arrays[1]);
    for (size_t i = 0; i < plane; i++) r->arrays[1][i] *= factor;
    run(&r->ways[1], r->arrays[1], r->arrays[0]);
  }
}
