/* Compares csrc/mpi/mpi.def and one header of csrc/mpi/abi with a real mpi.h: compiles only if they agree.
 *
 * ABI_HEADER names our header, MPI_HEADER the real one; check_headers.sh finds matching pairs.
 */

/* Our types under other names, as they are without an mpi.h. */
#include <stddef.h>
#include <stdint.h>
#define MPI_Comm       OUR_Comm
#define MPI_Datatype   OUR_Datatype
#define MPI_Op         OUR_Op
#define MPI_Group      OUR_Group
#define MPI_Message    OUR_Message
#define MPI_Request    OUR_Request
#define MPI_Aint       OUR_Aint
#define MPI_Count      OUR_Count
#define ABI_Status     OUR_Status
#define ABI_PROC_NULL  OUR_PROC_NULL
#define ABI_ANY_SOURCE OUR_ANY_SOURCE
#define ABI_ANY_TAG    OUR_ANY_TAG
#define ABI_UNDEFINED  OUR_UNDEFINED
#include ABI_HEADER
#undef MPI_Comm
#undef MPI_Datatype
#undef MPI_Op
#undef MPI_Group
#undef MPI_Message
#undef MPI_Request
#undef MPI_Aint
#undef MPI_Count
#undef MPI_Status
#undef ABI_Status
#undef ABI_PROC_NULL
#undef ABI_ANY_SOURCE
#undef ABI_ANY_TAG
#undef ABI_UNDEFINED

#include MPI_HEADER

/* The real constant may be a macro or an enumerator; ours must not clash with it. */
_Static_assert(MPI_SUCCESS == 0, "MPI_SUCCESS");
#undef MPI_SUCCESS
#define MPI_SUCCESS OUR_SUCCESS
#include "mpi/mpi_table.h" /* its callback types repeat those of mpi.h, so they must be the same */
_Static_assert(OUR_SUCCESS == 0, "our MPI_SUCCESS");

/* Prototypes. A function that the library may lack is compared where its version of MPI has it. */
#if MPI_VERSION >= 4
#define COMPARE_Get_count_c .Get_count_c = MPI_Get_count_c,
#else
#define COMPARE_Get_count_c
#endif
#define COMPARE_Get_elements_x        .Get_elements_x = MPI_Get_elements_x,
#define COMPARE_Status_set_elements_x .Status_set_elements_x = MPI_Status_set_elements_x,

struct mpi_table compared_functions = {
#define REQUIRED(name, parameters) .name = MPI_##name,
#define OPTIONAL(name, parameters) COMPARE_##name
#include "mpi/mpi.def"
#undef REQUIRED
#undef OPTIONAL
};

/* Types. */
#define SAME_TYPE(name) _Static_assert(_Generic((OUR_##name *)0, MPI_##name *: 1, default: 0), "MPI_" #name)
SAME_TYPE(Comm);
SAME_TYPE(Datatype);
SAME_TYPE(Op);
SAME_TYPE(Group);
SAME_TYPE(Message);
SAME_TYPE(Request);
#define SAME_INTEGER(name) \
  _Static_assert(sizeof(OUR_##name) == sizeof(MPI_##name) && (MPI_##name) - 1 < 0 && (OUR_##name) - 1 < 0, #name)
SAME_INTEGER(Aint);
SAME_INTEGER(Count);

_Static_assert(sizeof(ABI_Status) == sizeof(MPI_Status), "size of MPI_Status");
_Static_assert(_Alignof(ABI_Status) == _Alignof(MPI_Status), "alignment of MPI_Status");
#define SAME_FIELD(name) _Static_assert(offsetof(ABI_Status, name) == offsetof(MPI_Status, name), "MPI_Status." #name)
SAME_FIELD(MPI_SOURCE);
SAME_FIELD(MPI_TAG);
SAME_FIELD(MPI_ERROR);

/* The core hands handles around as intptr_t and takes attributes of 64 bits. */
_Static_assert(sizeof(MPI_Comm) <= sizeof(intptr_t) && sizeof(MPI_Op) <= sizeof(int64_t), "width of handles");

/* Constants. In C pointers make no constant expression; gcc and clang fold this one where it is asked so. */
_Static_assert((int)ABI_PROC_NULL == (int)MPI_PROC_NULL, "MPI_PROC_NULL");
_Static_assert((int)ABI_ANY_SOURCE == (int)MPI_ANY_SOURCE, "MPI_ANY_SOURCE");
_Static_assert((int)ABI_ANY_TAG == (int)MPI_ANY_TAG, "MPI_ANY_TAG");
_Static_assert((int)ABI_UNDEFINED == (int)MPI_UNDEFINED, "MPI_UNDEFINED");
#define SAME_POINTER(a, b) _Static_assert(__builtin_constant_p((a) == (b)) ? (a) == (b) : 0, #b)
SAME_POINTER(ABI_IN_PLACE, MPI_IN_PLACE);
_Static_assert(MPI_MAX_ERROR_STRING <= 1024, "room for the text of an error");
_Static_assert(MPI_MAX_LIBRARY_VERSION_STRING <= 8192, "room for the library's description");

/* Functions that the core looks up without a row in mpi.def. */
static int (*const compared_version)(char *, int *) = MPI_Get_library_version;
#if MPI_VERSION >= 5
static int (*const compared_abi)(int *, int *) = MPI_Abi_get_version;
#endif
int main(void) {
#if MPI_VERSION >= 5
  if (compared_abi == NULL) return 1;
#endif
  return compared_version == NULL;
}
