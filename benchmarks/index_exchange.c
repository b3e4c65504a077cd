/* What an exchange of rows by lists of indices is measured against. Rows of floats, first those that this process owns,
 * then copies of rows of others, its ghosts, which lie in the order of their owners. Rows that are ghosts elsewhere are
 * packed, one message for each process, and sent by MPI_Isend. Those that come are received in two ways: into their
 * places, since those of one owner are consecutive, or into a buffer, from which they are copied.
 *
 * Compiled by index_exchange.py. */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

/* What goes to one rank, or comes from it. */
struct message {
  int rank, count;
  const int *rows; /* of what is sent */
  int first;       /* row of what is received */
  float *buffer;
};

struct exchange {
  float *rows;
  int width, sends, receives, in_place;
  struct message *sent, *received;
  MPI_Request *requests;
};

/* Not freed: the program ends soon. `rows` are `width` floats each; the arrays that describe messages are kept. */
struct exchange *index_exchange_make(float *rows, int owned, int width, int sends, const int *send_ranks,
                                     const int *send_counts, const int *send_rows, int receives,
                                     const int *receive_ranks, const int *receive_counts, int in_place) {
  struct exchange *e = calloc(1, sizeof *e);
  e->rows = rows, e->width = width, e->sends = sends, e->receives = receives, e->in_place = in_place;
  e->sent = calloc((size_t)sends + 1, sizeof *e->sent);
  e->received = calloc((size_t)receives + 1, sizeof *e->received);
  e->requests = calloc((size_t)(sends + receives) + 1, sizeof *e->requests);
  for (int i = 0; i < sends; send_rows += send_counts[i++]) {
    e->sent[i] = (struct message){.rank = send_ranks[i], .count = send_counts[i], .rows = send_rows};
    e->sent[i].buffer = malloc(((size_t)send_counts[i] * (size_t)width + 1) * sizeof *rows);
  }
  for (int i = 0; i < receives; owned += receive_counts[i++]) {
    e->received[i] = (struct message){.rank = receive_ranks[i], .count = receive_counts[i], .first = owned};
    e->received[i].buffer = in_place ? rows + (size_t)owned * (size_t)width
                                     : malloc(((size_t)receive_counts[i] * (size_t)width + 1) * sizeof *rows);
  }
  return e;
}

static inline void pack(const struct message *m, const float *rows, size_t width) {
  for (int i = 0; i < m->count; i++)
    memcpy(m->buffer + (size_t)i * width, rows + (size_t)m->rows[i] * width, width * sizeof *rows);
}

/* The usual widths are constants where the compiler sees the loop. */
static void pack_any(const struct message *m, const float *rows, int width) {
  if (width == 1)
    pack(m, rows, 1);
  else if (width == 4)
    pack(m, rows, 4);
  else if (width == 64)
    pack(m, rows, 64);
  else
    pack(m, rows, (size_t)width);
}

static void exchange(struct exchange *e) {
  size_t width = (size_t)e->width;
  for (int i = 0; i < e->receives; i++) {
    struct message *m = &e->received[i];
    MPI_Irecv(m->buffer, m->count * e->width, MPI_FLOAT, m->rank, 1, MPI_COMM_WORLD, &e->requests[i]);
  }
  for (int i = 0; i < e->sends; i++) {
    struct message *m = &e->sent[i];
    pack_any(m, e->rows, e->width);
    MPI_Isend(m->buffer, m->count * e->width, MPI_FLOAT, m->rank, 1, MPI_COMM_WORLD, &e->requests[e->receives + i]);
  }
  if (!e->in_place)
    for (int left = e->receives; left > 0; left--) {
      int i;
      MPI_Waitany(e->receives, e->requests, &i, MPI_STATUS_IGNORE);
      struct message *m = &e->received[i];
      memcpy(e->rows + (size_t)m->first * width, m->buffer, (size_t)m->count * width * sizeof *e->rows);
    }
  MPI_Waitall(e->receives + e->sends, e->requests, MPI_STATUSES_IGNORE);
}

/* Steps: some exchanges, and then the first rows are multiplied. */
void index_exchange_run(struct exchange *e, int steps, int exchanges, float factor, int first_rows) {
  for (int s = 0; s < steps; s++) {
    for (int i = 0; i < exchanges; i++) exchange(e);
    for (int i = 0; i < first_rows * e->width; i++) e->rows[i] *= factor;
  }
}
