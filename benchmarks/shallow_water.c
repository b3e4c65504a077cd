// The model of shallow_water.py in plain C and MPI: what the machine can do.
//
// It is a shared library with one function, shallow_water_solve, for processes in which MPI is initialized already.
//
// A step is one sweep over the rows: fluxes, tendencies, new fields and friction of a row follow each other while the
// rows that they need are in the cache, and the fields are overwritten in place. As in shallow_water.py, ranks exchange
// once in LEAP steps, and with two ranks in a direction by one message. It runs on 1, 2 or 4 ranks.

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef LEAP
#define LEAP 4
#endif

// Before a loop: its iterations do not depend on each other.
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

enum {
  NX = 360,
  NY = 180,
  HALO = 2 * LEAP,
  FIELDS = 6,   // h, u, v and their tendencies
  MARGIN = 16,  // a vector: cells before and after each row of results, and before and after all rows of a field
  ROW = (NX + 2 * HALO + 15) / 16 * 16 + 2 * MARGIN,
};

static const double DX = 5e3, GRAVITY = 9.81, DEPTH = 100.0, CORIOLIS = 2e-4, BETA = 2e-11, PI = 3.14159265358979;

typedef struct {
  MPI_Comm comm;
  int parts_x, row, column, ny, nx;
  int south, north, side;  // ranks; MPI_PROC_NULL beyond a wall; the one to the west is also the one to the east
  int width;               // of rows with their halo and some unused cells, a multiple of a vector
  float *field[FIELDS];    // (ny + 2 HALO + 2) rows each: the first and the last are read, but make no difference
  float *message[2];
  float dt, viscosity;
} Sea;

// A row with its halo.
static float *row(const Sea *sea, int n, int j) {
  return sea->field[n] + MARGIN + (ptrdiff_t)(j + HALO + 1) * sea->width;
}

static float *at(const Sea *sea, int n, int j, int i) { return row(sea, n, j) + i + HALO; }

static void *allocate(size_t bytes) {
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) {
    fprintf(stderr, "shallow_water: out of memory\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
  }
  return memset(memory, 0, (bytes + 63) / 64 * 64);
}

// Whether there is water on both sides of the northern edges of row j.
static float is_open(const Sea *sea, int j) {
  j += sea->row * sea->ny;
  return j >= 0 && j < NY - 1 ? 1.0F : 0.0F;
}

// One step. All loops go over whole rows with their halo, for aligned vectors. So the cells at the ends of a row, one
// more in each loop that looks to the sides, are wrong: as many as a step takes away from the halo. Rows beyond those
// that are needed are left out.

typedef struct {
  _Alignas(64) float x[ROW], y[ROW], q[ROW], p[ROW];  // mass fluxes, potential vorticity, Bernoulli potential
} Fluxes;

typedef struct {
  _Alignas(64) float u[ROW], v[ROW];
} Velocity;

static void flux_row(const Sea *sea, int j, Fluxes *fluxes) {
  const float *restrict h = row(sea, 0, j), *restrict h_north = row(sea, 0, j + 1);
  const float *restrict u = row(sea, 1, j), *restrict u_north = row(sea, 1, j + 1);
  const float *restrict v = row(sea, 2, j), *restrict v_south = row(sea, 2, j - 1);
  float *restrict x = fluxes->x + MARGIN, *restrict y = fluxes->y + MARGIN;
  float *restrict q = fluxes->q + MARGIN, *restrict p = fluxes->p + MARGIN;
  const float half_open = 0.5F * is_open(sea, j), g = (float)GRAVITY, depth = (float)DEPTH;
  const float f = (float)(4.0 * (CORIOLIS + BETA * DX * (j + sea->row * sea->ny))), per_dx = (float)(4.0 / DX);
  INDEPENDENT
  for (int i = 0; i < sea->width; i++) {
    const float here = h[i] + h[i + 1], there = h_north[i] + h_north[i + 1];
    x[i] = 0.5F * here * u[i];
    y[i] = half_open * (h[i] + h_north[i]) * v[i];
    q[i] = (f + per_dx * (v[i + 1] - v[i] - u_north[i] + u[i])) / (here + there);
    p[i] = g * (h[i] - depth) + 0.25F * (u[i] * u[i] + u[i - 1] * u[i - 1] + v[i] * v[i] + v_south[i] * v_south[i]);
  }
}

static void advance_row(const Sea *sea, int j, float weight, float old_weight, const Fluxes *south, const Fluxes *here,
                        const Fluxes *north, float *h_result, Velocity *velocity) {
  const float *restrict x = here->x + MARGIN, *restrict x_north = north->x + MARGIN;
  const float *restrict y = here->y + MARGIN, *restrict y_south = south->y + MARGIN;
  const float *restrict q = here->q + MARGIN, *restrict q_south = south->q + MARGIN;
  const float *restrict p = here->p + MARGIN, *restrict p_north = north->p + MARGIN;
  const float *restrict h = row(sea, 0, j), *restrict u = row(sea, 1, j), *restrict v = row(sea, 2, j);
  float *restrict dh = row(sea, 3, j), *restrict du = row(sea, 4, j), *restrict dv = row(sea, 5, j);
  float *restrict h_new = h_result + MARGIN;
  float *restrict u_new = velocity->u + MARGIN, *restrict v_new = velocity->v + MARGIN;
  const float per_dx = (float)(1.0 / DX), open = is_open(sea, j);
  const float a = sea->dt * weight, b = sea->dt * old_weight;
  INDEPENDENT
  for (int i = 0; i < sea->width; i++) {
    const float h_change = -per_dx * (x[i] - x[i - 1] + y[i] - y_south[i]);
    const float u_change =
        0.25F * (q[i] * (y[i] + y[i + 1]) + q_south[i] * (y_south[i] + y_south[i + 1])) - per_dx * (p[i + 1] - p[i]);
    const float v_change =
        -0.25F * (q[i] * (x[i] + x_north[i]) + q[i - 1] * (x[i - 1] + x_north[i - 1])) - per_dx * (p_north[i] - p[i]);
    h_new[i] = h[i] + a * h_change + b * dh[i];
    u_new[i] = u[i] + a * u_change + b * du[i];
    v_new[i] = open * (v[i] + a * v_change + b * dv[i]);
    dh[i] = h_change;
    du[i] = u_change;
    dv[i] = v_change;
  }
}

// The flux of v is proportional to the difference between a v and the u of the cell west or south of it.
static void friction_row(const Sea *sea, int j, const Velocity *south, const Velocity *here, const Velocity *north) {
  const float *restrict u = here->u + MARGIN, *restrict v = here->v + MARGIN;
  const float *restrict u_south = south->u + MARGIN;
  const float *restrict u_north = north->u + MARGIN, *restrict v_north = north->v + MARGIN;
  float *restrict u_new = row(sea, 1, j), *restrict v_new = row(sea, 2, j);
  const float factor = (float)(sea->dt * sea->viscosity / (DX * DX));
  const float to_north = is_open(sea, j), to_south = is_open(sea, j - 1);
  INDEPENDENT
  for (int i = 0; i < sea->width; i++) {
    u_new[i] = u[i] + factor * (u[i + 1] - 2.0F * u[i] + u[i - 1] + to_north * (u_north[i] - u[i]) -
                                to_south * (u[i] - u_south[i]));
    v_new[i] = v[i] + factor * (v[i + 1] - u[i] - v[i] + u[i - 1] + to_north * (v_north[i] - u[i]) -
                                to_south * (v[i] - u_south[i]));
  }
}

// Compute the tendencies of this rank's cells and `ring` around them, and the fields of one less around.
static void step(const Sea *sea, int ring, float weight, float old_weight) {
  static Fluxes fluxes[3];
  static Velocity velocity[3];
  static _Alignas(64) float h_new[ROW];
  const int first = -ring, last = sea->ny + ring - 1;
  flux_row(sea, first - 1, &fluxes[0]);
  flux_row(sea, first, &fluxes[1]);
  for (int j = first; j <= last; j++) {
    const int n = j - first;
    flux_row(sea, j + 1, &fluxes[(n + 2) % 3]);
    advance_row(sea, j, weight, old_weight, &fluxes[n % 3], &fluxes[(n + 1) % 3], &fluxes[(n + 2) % 3], h_new,
                &velocity[n % 3]);
    memcpy(row(sea, 0, j), h_new + MARGIN, sizeof(float) * (size_t)sea->width);
    if (n >= 2) {
      friction_row(sea, j - 1, &velocity[(n - 2) % 3], &velocity[(n - 1) % 3], &velocity[n % 3]);
    }
  }
}

// Exchange. A message has the same rectangle of all fields.

static int pack(const Sea *sea, int j, int i, int rows, int columns, float *message, int unpack) {
  int count = 0;
  for (int n = 0; n < FIELDS; n++) {
    for (int k = 0; k < rows; k++, count += columns) {
      float *cells = at(sea, n, j + k, i);
      memcpy(unpack ? cells : message + count, unpack ? message + count : cells, sizeof(float) * (size_t)columns);
    }
  }
  return count;
}

// Beyond a wall h is DEPTH, and nothing moves.
static void rest(const Sea *sea, int j) {
  for (int n = 0; n < FIELDS; n++) {
    for (int i = 0; i < sea->width; i++) {
      row(sea, n, j)[i] = n == 0 ? (float)DEPTH : 0.0F;
    }
  }
}

static void exchange(const Sea *sea) {
  float *sent = sea->message[0], *received = sea->message[1];
  const int ny = sea->ny, nx = sea->nx, wide = nx + 2 * HALO;
  if (sea->parts_x == 1) {
    for (int n = 0; n < FIELDS; n++) {
      for (int j = 0; j < ny; j++) {
        memcpy(at(sea, n, j, -HALO), at(sea, n, j, nx - HALO), HALO * sizeof(float));
        memcpy(at(sea, n, j, nx), at(sea, n, j, 0), HALO * sizeof(float));
      }
    }
  } else {
    int count = pack(sea, 0, 0, ny, HALO, sent, 0);
    count += pack(sea, 0, nx - HALO, ny, HALO, sent + count, 0);
    MPI_Sendrecv(sent, count, MPI_FLOAT, sea->side, 0, received, count, MPI_FLOAT, sea->side, 0, sea->comm,
                 MPI_STATUS_IGNORE);
    pack(sea, 0, nx, ny, HALO, received, 1);
    pack(sea, 0, -HALO, ny, HALO, received + count / 2, 1);
  }
  for (int to_north = 0; to_north < 2; to_north++) {
    const int neighbour = to_north ? sea->north : sea->south;
    if (neighbour != MPI_PROC_NULL) {
      const int count = pack(sea, to_north ? ny - HALO : 0, -HALO, HALO, wide, sent, 0);
      MPI_Sendrecv(sent, count, MPI_FLOAT, neighbour, 1, received, count, MPI_FLOAT, neighbour, 1, sea->comm,
                   MPI_STATUS_IGNORE);
      pack(sea, to_north ? ny : -HALO, -HALO, HALO, wide, received, 1);
    } else {
      for (int j = 0; j < HALO; j++) {
        rest(sea, to_north ? ny + j : -1 - j);
      }
    }
  }
}

// A jet in geostrophic balance and a ripple.
static void start(const Sea *sea) {
  const double width = 0.02 * (NX - 1);
  double profile[NY + 2], mean = 0.0, sum = 0.0;  // rows -1 to NY
  for (int j = -1; j <= NY; j++) {
    sum -= (CORIOLIS + BETA * DX * j) * 10.0 * exp(-pow((j - 0.5 * (NY - 1)) / width, 2)) / GRAVITY * DX;
    profile[j + 1] = sum;
    mean += sum / (NY + 2);
  }
  for (int j = -HALO - 1; j < sea->ny + HALO + 1; j++) {
    const int y = j + sea->row * sea->ny;
    rest(sea, j);
    for (int i = -HALO; y >= 0 && y < NY && i < sea->nx + HALO; i++) {
      const int x = (i + sea->column * sea->nx + NX) % NX;
      const double ripple = 0.2 * sin(x * 10.0 * PI / (NX - 1)) * cos(y * 8.0 * PI / (NY - 1));
      *at(sea, 0, j, i) = (float)(DEPTH + profile[y + 1] - mean + ripple);
      *at(sea, 1, j, i) = (float)(10.0 * exp(-pow((y - 0.5 * (NY - 1)) / width, 2)));
    }
  }
}

// Do one step and then `blocks` times `block_steps`, a multiple of LEAP, keeping the state after each block. Return the
// seconds that the latter took on this rank, between barriers, and in `fields` this rank's cells of h, u and v (shape
// 3 x ny x nx). Collective over MPI_COMM_WORLD.
double shallow_water_solve(int blocks, int block_steps, float *fields);

double shallow_water_solve(int blocks, int block_steps, float *fields) {
  Sea sea = {.dt = (float)(0.125 * DX / sqrt(GRAVITY * DEPTH)), .viscosity = (float)(1e-3 * CORIOLIS * DX * DX)};
  int size, rank;
  MPI_Comm_dup(MPI_COMM_WORLD, &sea.comm);
  MPI_Comm_size(sea.comm, &size);
  MPI_Comm_rank(sea.comm, &rank);
  const int parts_y = size < 2 ? 1 : 2;
  sea.parts_x = size / parts_y;
  sea.row = rank / sea.parts_x;
  sea.column = rank % sea.parts_x;
  sea.ny = NY / parts_y;
  sea.nx = NX / sea.parts_x;
  sea.south = sea.row > 0 ? rank - sea.parts_x : MPI_PROC_NULL;
  sea.north = sea.row < parts_y - 1 ? rank + sea.parts_x : MPI_PROC_NULL;
  sea.side = sea.row * sea.parts_x + (sea.column + 1) % sea.parts_x;
  sea.width = (sea.nx + 2 * HALO + 15) / 16 * 16;
  const size_t cells = (size_t)(sea.ny + 2 * HALO + 2) * (size_t)sea.width + 2 * MARGIN;
  for (int n = 0; n < FIELDS; n++) {
    sea.field[n] = allocate(cells * sizeof(float));
  }
  for (int n = 0; n < 2; n++) {
    sea.message[n] = allocate((size_t)FIELDS * 2 * HALO * (size_t)(sea.nx + sea.ny + 2 * HALO) * sizeof(float));
  }
  float **states = allocate((size_t)(blocks + 1) * FIELDS * sizeof(float *));

  start(&sea);
  step(&sea, HALO - 1, 1.0F, 0.0F);
  exchange(&sea);
  MPI_Barrier(sea.comm);
  double seconds = -MPI_Wtime();
  for (int block = 0; block < blocks; block++) {
    for (int n = 0; n < block_steps; n++) {
      step(&sea, HALO - 1 - 2 * (n % LEAP), 1.6F, -0.6F);
      if (n % LEAP == LEAP - 1) {
        exchange(&sea);
      }
    }
    for (int n = 0; n < FIELDS; n++) {
      float *copy = states[block * FIELDS + n] = malloc(cells * sizeof(float));
      if (copy) {
        memcpy(copy, sea.field[n], cells * sizeof(float));
      }
    }
  }
  MPI_Barrier(sea.comm);
  seconds += MPI_Wtime();

  for (int n = 0; n < 3; n++) {
    for (int j = 0; j < sea.ny; j++, fields += sea.nx) {
      memcpy(fields, at(&sea, n, j, 0), sizeof(float) * (size_t)sea.nx);
    }
  }
  for (int n = 0; n < blocks * FIELDS; n++) {
    free(states[n]);
  }
  free(states);
  for (int n = 0; n < FIELDS; n++) {
    free(sea.field[n]);
  }
  free(sea.message[0]);
  free(sea.message[1]);
  MPI_Comm_free(&sea.comm);
  return seconds;
}
