/* What the exchange of halos is measured against: packed buffers, and MPI_Isend and MPI_Irecv, in two ways.
 *
 * Fields of float, (rows + 2 w) x (columns + 2 w), on processes in `down` rows and `across` columns, the last fastest;
 * periodic along both axes where there are several processes, and with walls along an axis where there is one, whose
 * halo travels with the rest, as with Grid.exchange. All that goes to one rank, in whichever direction, is one message.
 * Compiled by halos.py. */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

enum { DIRECTIONS = 8, PEERS = 8 };

struct strip {
  int top, left, height, width;
};

struct peer {
  int rank, count;
  struct strip out[DIRECTIONS], in[DIRECTIONS];
  size_t floats; /* of one field */
  float *sent, *received;
};

struct phase {
  int count;
  struct peer peers[PEERS];
};

struct halos {
  float **fields;
  int number, rows, columns, w, pitch, phase_count;
  struct phase phases[2];
};

/* Copies a strip of all fields into a message, or a message into a strip; returns the place behind in the message. */
static float *pack(const struct halos *h, const struct strip *s, float *message, int unpack) {
  for (int f = 0; f < h->number; f++)
    for (int i = 0; i < s->height; i++, message += s->width) {
      float *cells = h->fields[f] + (size_t)(s->top + i) * h->pitch + s->left;
      float *to = unpack ? cells : message, *from = unpack ? message : cells;
      if (s->width == 2)
        memcpy(to, from, 2 * sizeof *to);
      else
        memcpy(to, from, (size_t)s->width * sizeof *to);
    }
  return message;
}

static void exchange(struct halos *h) {
  for (int p = 0; p < h->phase_count; p++) {
    struct phase *phase = &h->phases[p];
    MPI_Request requests[2 * PEERS];
    int n = phase->count;
    for (int k = 0; k < n; k++)
      MPI_Irecv(phase->peers[k].received, (int)(phase->peers[k].floats * (size_t)h->number), MPI_FLOAT,
                phase->peers[k].rank, 1, MPI_COMM_WORLD, &requests[k]);
    for (int k = 0; k < n; k++) {
      float *to = phase->peers[k].sent;
      for (int i = 0; i < phase->peers[k].count; i++) to = pack(h, &phase->peers[k].out[i], to, 0);
      MPI_Isend(phase->peers[k].sent, (int)(phase->peers[k].floats * (size_t)h->number), MPI_FLOAT,
                phase->peers[k].rank, 1, MPI_COMM_WORLD, &requests[n + k]);
    }
    MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
    for (int k = 0; k < n; k++) {
      float *from = phase->peers[k].received;
      for (int i = 0; i < phase->peers[k].count; i++) from = pack(h, &phase->peers[k].in[i], from, 1);
    }
    MPI_Waitall(n, requests + n, MPI_STATUSES_IGNORE);
  }
}

/* Along one axis: where the halo of a direction begins and ends, or, if not `halo`, the cells for the opposite halo. */
static void range(int direction, int cells, int w, int halo, int whole, int *first, int *size) {
  *size = direction == 0 ? cells + (whole ? 2 * w : 0) : w;
  if (direction == 0)
    *first = whole ? 0 : w;
  else if (direction < 0)
    *first = halo ? 0 : w;
  else
    *first = halo ? w + cells : cells;
}

static void add(struct halos *h, struct phase *phase, int rank, int di, int dj, int tall, int wide) {
  struct strip out, in;
  int k = 0;
  while (k < phase->count && phase->peers[k].rank != rank) k++;
  struct peer *peer = &phase->peers[k];
  if (k == phase->count) phase->count++, peer->rank = rank;
  /* What comes from direction d has been sent in direction -d: in the order in which the sender sends. */
  range(di, h->rows, h->w, 0, tall, &out.top, &out.height);
  range(dj, h->columns, h->w, 0, wide, &out.left, &out.width);
  range(-di, h->rows, h->w, 1, tall, &in.top, &in.height);
  range(-dj, h->columns, h->w, 1, wide, &in.left, &in.width);
  peer->out[peer->count] = out;
  peer->in[peer->count++] = in;
  peer->floats += (size_t)in.height * (size_t)in.width;
}

/* `in_turn`: one axis after the other, with the corners in the second; otherwise all at once. */
struct halos *halos_make(float **fields, int number, int rows, int columns, int w, int down, int across, int in_turn) {
  struct halos *h = calloc(1, sizeof *h);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  h->fields = malloc((size_t)number * sizeof *h->fields);
  memcpy(h->fields, fields, (size_t)number * sizeof *h->fields);
  h->number = number, h->rows = rows, h->columns = columns, h->w = w, h->pitch = columns + 2 * w;
  h->phase_count = in_turn ? 2 : 1;
  int i = rank / across, j = rank % across;
  for (int di = -1; di <= 1; di++)
    for (int dj = -1; dj <= 1; dj++) {
      if ((di == 0 && dj == 0) || (di != 0 && down == 1) || (dj != 0 && across == 1)) continue;
      if (in_turn && di != 0 && dj != 0) continue;
      int to = (i + di + down) % down * across + (j + dj + across) % across;
      add(h, &h->phases[in_turn && dj != 0], to, di, dj, in_turn || down == 1, in_turn || across == 1);
    }
  for (int p = 0; p < h->phase_count; p++)
    for (int k = 0; k < h->phases[p].count; k++) {
      struct peer *peer = &h->phases[p].peers[k];
      peer->sent = malloc(peer->floats * (size_t)number * sizeof *peer->sent);
      peer->received = malloc(peer->floats * (size_t)number * sizeof *peer->received);
    }
  return h;
}

/* Steps: an exchange, and then the first w rows of the first field are multiplied. */
void halos_run(struct halos *h, int steps, float factor) {
  for (int s = 0; s < steps; s++) {
    exchange(h);
    float *row = h->fields[0] + (size_t)h->w * h->pitch;
    for (int i = 0; i < h->w * h->pitch; i++) row[i] *= factor;
  }
}
