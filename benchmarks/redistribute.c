/* What a redistribution is measured against: a cube of floats in slabs, cut along the first axis, becomes pencils, cut
 * along the second, and slabs again, in two ways:
 *
 *   packed      parts are packed into messages, which are taken apart as they come; what stays on a rank is copied
 *   alltoallw   one MPI_Alltoallw with MPI_Type_create_subarray on both sides
 *
 * Compiled by redistribute.py. */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 64 };
enum side { SLAB, PENCIL };

/* Ranks have n / size = m planes of n x n floats each, or n planes of m x n. What one of two ranks has as a slab and
 * the other as a pencil is their part: m runs of m x n floats. */
struct redistribution {
  int rank, size;
  size_t run, runs, steps[2]; /* from one run of a part to the next, on each side */
  float *arrays[2], *out[MOST_RANKS], *in[MOST_RANKS];
  MPI_Datatype types[2][MOST_RANKS];
  int ones[MOST_RANKS], zeros[MOST_RANKS];
};

static MPI_Datatype subarray(const int sizes[3], const int counts[3], const int starts[3]) {
  MPI_Datatype type;
  MPI_Type_create_subarray(3, sizes, counts, starts, MPI_ORDER_C, MPI_FLOAT, &type);
  MPI_Type_commit(&type);
  return type;
}

static float *room(size_t floats) { return aligned_alloc(64, (floats * sizeof(float) + 64) / 64 * 64); }

/* Of a cube of n x n x n, which the number of ranks divides. Not freed: the program ends soon. */
struct redistribution *redistribution_make(int n) {
  struct redistribution *r = calloc(1, sizeof *r);
  MPI_Comm_rank(MPI_COMM_WORLD, &r->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &r->size);
  int m = n / r->size;
  r->runs = (size_t)m, r->run = (size_t)m * (size_t)n;
  r->steps[SLAB] = (size_t)n * (size_t)n, r->steps[PENCIL] = r->run;
  for (int side = 0; side < 2; side++) r->arrays[side] = room((size_t)n * r->run);
  for (int i = 0; i < r->size; i++) {
    r->types[SLAB][i] = subarray((int[]){m, n, n}, (int[]){m, m, n}, (int[]){0, i * m, 0});
    r->types[PENCIL][i] = subarray((int[]){n, m, n}, (int[]){m, m, n}, (int[]){i * m, 0, 0});
    r->out[i] = room(r->runs * r->run), r->in[i] = room(r->runs * r->run);
    r->ones[i] = 1;
  }
  return r;
}

/* The slab, which the caller fills and reads. */
float *redistribution_array(struct redistribution *r) { return r->arrays[SLAB]; }

/* Where the part that is also another rank's begins. */
static float *part(const struct redistribution *r, enum side side, int other) {
  return r->arrays[side] + (size_t)other * r->run * (side == SLAB ? 1 : r->runs);
}

static void copy(const struct redistribution *r, float *to, size_t to_step, const float *from, size_t from_step) {
  size_t runs = r->runs, run = r->run;
  if (to_step == run && from_step == run) run *= runs, runs = 1;
  for (size_t i = 0; i < runs; i++) memcpy(to + i * to_step, from + i * from_step, run * sizeof(float));
}

static void packed(struct redistribution *r, enum side side) {
  enum side other = side == SLAB ? PENCIL : SLAB;
  MPI_Request requests[2 * MOST_RANKS];
  int others = r->size - 1, count = (int)(r->runs * r->run);
  for (int i = 0; i < others; i++) {
    int source = (r->rank + others - i) % r->size;
    MPI_Irecv(r->in[i], count, MPI_FLOAT, source, 1, MPI_COMM_WORLD, &requests[i]);
  }
  for (int i = 0; i < others; i++) {
    int target = (r->rank + 1 + i) % r->size;
    copy(r, r->out[i], r->run, part(r, side, target), r->steps[side]);
    MPI_Isend(r->out[i], count, MPI_FLOAT, target, 1, MPI_COMM_WORLD, &requests[others + i]);
  }
  copy(r, part(r, other, r->rank), r->steps[other], part(r, side, r->rank), r->steps[side]);
  for (int left = others; left > 0; left--) {
    int i;
    MPI_Waitany(others, requests, &i, MPI_STATUS_IGNORE);
    copy(r, part(r, other, (r->rank + others - i) % r->size), r->steps[other], r->in[i], r->run);
  }
  MPI_Waitall(others, requests + others, MPI_STATUSES_IGNORE);
}

static void alltoallw(struct redistribution *r, enum side side) {
  enum side other = side == SLAB ? PENCIL : SLAB;
  MPI_Alltoallw(r->arrays[side], r->ones, r->zeros, r->types[side], r->arrays[other], r->ones, r->zeros,
                r->types[other], MPI_COMM_WORLD);
}

/* Steps: to pencils, whose first plane is multiplied, and back. */
void redistribution_run(struct redistribution *r, int steps, float factor, int by_alltoallw) {
  void (*run)(struct redistribution *, enum side) = by_alltoallw ? alltoallw : packed;
  for (int s = 0; s < steps; s++) {
    run(r, SLAB);
    for (size_t i = 0; i < r->run; i++) r->arrays[PENCIL][i] *= factor;
    run(r, PENCIL);
  }
}
