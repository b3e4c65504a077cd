/* Which copy of the core is chosen for a library: by what the library returns, and only otherwise by its file name.
 * Arguments: the fake libraries openmpi, mpich, mpiabi, and two called libmpi.so.40 and libmpi.so.12. */
#include <dlfcn.h>

#include "harness.h"

enum { OPENMPI, MPICH, MPIABI, SO_40, SO_12, LIBRARIES };
static struct library {
  void *handle;
  struct fake_control *control;
} libraries[LIBRARIES];

/* The abi found for a library that describes itself so. */
static const struct abi *found(int library, const char *version, int abi_major) {
  struct fake_control *control = libraries[library].control, before = *control;
  char text[16384];
  control->version = version;
  control->abi_major = abi_major;
  const struct abi *abi_found = abi_find(libraries[library].handle, text, sizeof text);
  context("library %d, which says '%.40s' and ABI %d", library, version, abi_major);
  CHECK(strcmp(text, version) == 0);
  control->version = before.version;
  control->abi_major = before.abi_major;
  return abi_found;
}

TEST(each_library_finds_its_copy) {
  const struct abi *const copies[] = {&abi_openmpi, &abi_mpich, &abi_mpiabi};
  const char *const names[] = {"openmpi", "mpich", "mpiabi"};
  for (int i = OPENMPI; i <= MPIABI; i++) {
    char version[64];
    const struct abi *copy = abi_find(libraries[i].handle, version, sizeof version);
    context("%s", names[i]);
    CHECK(copy == copies[i] && strcmp(copies[i]->name, names[i]) == 0);
    CHECK(strcmp(version, libraries[i].control->version) == 0);
    CHECK(copies[i]->load(libraries[i].handle) == NULL);
  }
}

/* Copies are apart: three libraries at once, each called through its own table. */
TEST(copies_do_not_share_their_tables) {
  const struct abi *const copies[] = {&abi_openmpi, &abi_mpich, &abi_mpiabi};
  struct communicator *comms[3];
  for (int i = OPENMPI; i <= MPIABI; i++) CHECK(copies[i]->load(libraries[i].handle) == NULL);
  for (int i = OPENMPI; i <= MPIABI; i++)
    CHECK_EQUAL(copies[i]->communicator(libraries[i].control->comm_new(i, 3), NULL, &comms[i]), 0);
  for (int i = OPENMPI; i <= MPIABI; i++) {
    CHECK(comms[i]->rank == i && comms[i]->size == 3);
    CHECK(copies[i]->bodies[0] != copies[(i + 1) % 3]->bodies[0]);
    libraries[i].control->comm_free(comms[i]->handle);
    CHECK(comms[i]->freed);
  }
}

TEST(the_name_decides) {
  FOR_VALUES (string, version, "MPICH Version: 4.3.0\nMPICH Release date: x", "Intel(R) MPI Library 2021.10",
              "MVAPICH2 Version :\t2.3.7", "MPI VERSION : CRAY MPICH version 8.1.2")
    CHECK(found(MPICH, *version, -1) == &abi_mpich);
  CHECK(found(OPENMPI, "Open MPI v4.1.6, package: x", -1) == &abi_openmpi);
  CHECK(found(OPENMPI, "Open MPI v5.0.11, package: x", -1) == &abi_openmpi);
}

TEST(the_abi_decides_before_the_name) {
  CHECK(found(MPIABI, "MPICH Version: 5.0.0", 1) == &abi_mpiabi);
  CHECK(found(MPIABI, "Open MPI v6.0.0", 1) == &abi_mpiabi);
  CHECK(found(MPIABI, "nobody", 1) == &abi_mpiabi);
  CHECK(found(MPICH, "MPICH Version: 5.0.0", -1) == &abi_mpich); /* has the function, and not the ABI */
  CHECK(found(MPICH, "MPICH Version: 5.0.0", 0) == &abi_mpich);
}

TEST(the_soname_decides_where_nothing_else_does) {
  CHECK(found(SO_40, "A vendor's MPI 3", -1) == &abi_openmpi);
  CHECK(found(SO_12, "A vendor's MPI 3", -1) == &abi_mpich);
  CHECK(found(SO_12, "Open MPI v9", -1) == &abi_openmpi);
}

TEST(an_unknown_library_finds_none) {
  char version[64];
  CHECK(found(OPENMPI, "A vendor's MPI 3", -1) == NULL);
  CHECK(found(MPICH, "", -1) == NULL);
  CHECK(found(MPICH, "not Open MPI", -1) == NULL);
  void *maths = dlopen("libm.so.6", RTLD_NOW), *self = dlopen(NULL, RTLD_NOW);
  CHECK(maths != NULL && abi_find(maths, version, sizeof version) == NULL);
  CHECK(self != NULL && abi_find(self, version, sizeof version) == NULL);
  libraries[MPICH].control->version_code = 15;
  CHECK(abi_find(libraries[MPICH].handle, version, sizeof version) == NULL);
  libraries[MPICH].control->version_code = 0;
  dlclose(maths);
  dlclose(self);
}

TEST(the_description_is_cut_to_its_room) {
  static char longest[8192];
  char version[12];
  memset(longest, 'x', sizeof longest - 1);
  memcpy(longest, "MPICH Version", 13);
  CHECK(found(MPICH, longest, -1) == &abi_mpich);
  blank(version, sizeof version);
  CHECK(abi_find(libraries[OPENMPI].handle, version, 9) == &abi_openmpi);
  CHECK(strcmp(version, "Open MPI") == 0 && is_blank(version, 9, sizeof version));
}

int main(int argc, char **argv) {
  for (int i = 0; i < LIBRARIES; i++) {
    libraries[i].handle = i + 1 < argc ? dlopen(argv[i + 1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (libraries[i].handle == NULL) return 1;
    libraries[i].control = dlsym(libraries[i].handle, "fake_control");
  }
  return run_tests(1, argv);
}
