#include "mpi/receive.h"

#include <stdio.h>

int64_t message_count(const MPI_Status *status, MPI_Datatype type) {
  MPI_Count large = ABI_UNDEFINED;
  int small = ABI_UNDEFINED;
  if (mpi.Get_count_c != NULL)
    mpi.Get_count_c(status, type, &large);
  else if (mpi.Get_count(status, type, &small) == MPI_SUCCESS && small != ABI_UNDEFINED)
    large = small;
  else if (mpi.Get_elements_x != NULL)
    mpi.Get_elements_x(status, type, &large);
  return large == ABI_UNDEFINED ? -1 : (int64_t)large;
}

int receive_bytes(MPI_Message *message, void *data, int64_t bytes, MPI_Status *status) {
  struct span span = span_of_bytes(bytes);
  int code = span.code == MPI_SUCCESS ? mpi.Mrecv(data, span.count, span.type, message, status) : span.code;
  span_free(&span);
  return code;
}

int message_discard(MPI_Message *message, int64_t bytes) {
  void *scratch = bytes > 0 ? malloc((size_t)bytes) : NULL;
  if (bytes < 0 || (bytes > 0 && scratch == NULL)) return CODE_NO_MEMORY;
  MPI_Status ignored;
  int code = receive_bytes(message, scratch, bytes, &ignored);
  free(scratch);
  return code;
}

/* Return the error for a message of `sent` bytes that does not fit the template; NULL if the last message of a pytree
 * will report it. `code`: of the message's removal from the channel; `by_status`: the user passes a status; `label`:
 * NULL if the message has none. */
static ffi_error *misfit(const struct call *call, const struct buffer *out, int64_t sent, const MPI_Status *status,
                         int code, bool by_status, const struct label *label) {
  int64_t width = (int64_t)out->type->bytes, expected = out->count * width;
  bool longer = sent > expected;
  const char *what = sent < 0 ? "has a size that MPI does not know" : longer ? "would be truncated" : "is too short";
  const char *then = code == MPI_SUCCESS ? "dropped" : "left unreceived: it could not be taken off the channel";
  return call_fail_dropped(
      call, out,
      "the message from rank %d with tag %d%s%.200s has %" PRId64 " bytes (%" PRId64
      " elements of %s), the template %" PRId64 " bytes (%" PRId64
      " elements): it %s, so it was %s. Receive with a template of the shape and dtype that is sent%s%s",
      status->MPI_SOURCE, status->MPI_TAG, label != NULL && label->lines[0] != '\0' ? " " : "",
      label != NULL ? label->lines : "", sent, sent / width, out->type->name, expected, out->count, what, then,
      longer || by_status || call->operation->row == ROW_irecv
          ? ""
          : ", or pass status= to accept shorter ones (the rest is then zero)",
      advice_on_vmap(sent, expected));
}

/* Drop a message that does not fit the template. Return the error. */
static ffi_error *reject(struct call *call, const struct buffer *out, MPI_Message *message, const MPI_Status *status,
                         bool by_status) {
  int64_t sent = message_bytes(status);
  int code = message_discard(message, sent);
  if (code != MPI_SUCCESS && code != CODE_NO_MEMORY) return call_fail_in(call, "MPI_Mrecv", code);
  return misfit(call, out, sent, status, code, by_status, NULL);
}

/* Finish a template that contains a message of `count` elements. */
static inline ffi_error *finish_template(struct call *call, const struct buffer *out, int64_t count,
                                         const MPI_Status *status, MPI_Status *users) {
  if (users != NULL) *users = *status;
  if (count < out->count) /* a short message, or none (MPI_PROC_NULL): the rest is zero */
    return call_zero(call, buffer_at(out, count), (size_t)(out->count - count) * out->type->bytes);
  return NULL;
}

ffi_error *receive_from_memory(struct call *call, const struct buffer *out, const char *data, int64_t bytes,
                               MPI_Status *status, MPI_Status *users) {
  const struct label *label = label_find(data, bytes);
  int64_t width = (int64_t)out->type->bytes, room = out->count * width;
  const struct datatype *sent = label != NULL ? datatype_find((int)label->dtype) : NULL;
  if (label != NULL) data += sizeof *label, bytes -= (int64_t)sizeof *label;
  if (sent != NULL && sent != out->type) {
    return call_fail_dropped(call, out,
                             "the message from rank %d with tag %d%s%.200s is of %" PRId64
                             " %s, the template of %" PRId64
                             " %s, so it was dropped. Receive with a template of the shape and dtype that is sent",
                             status->MPI_SOURCE, status->MPI_TAG, label->lines[0] != '\0' ? " " : "", label->lines,
                             label->count, sent->name, out->count, out->type->name);
  }
  if (bytes > room || bytes % width != 0 || (bytes < room && users == NULL))
    return misfit(call, out, bytes, status, MPI_SUCCESS, users != NULL, label);
  if (bytes > 0) memcpy(out->data, data, (size_t)bytes);
  if (users != NULL && bytes > INT_MAX && mpi.Status_set_elements_x != NULL)
    TRY_MPI(call, Status_set_elements_x, status, bytes_type(), (MPI_Count)bytes);
  else if (users != NULL && bytes <= INT_MAX)
    TRY_MPI(call, Status_set_elements, status, bytes_type(), (int)bytes);
  return finish_template(call, out, bytes / width, status, users);
}

/* receive_into for a message that may have a label. */
static ffi_error *receive_labelled(struct call *call, const struct buffer *out, MPI_Message *message,
                                   MPI_Status *status, MPI_Status *users) {
  int64_t bytes = message_bytes(status);
  char *data = bytes >= 0 ? malloc((size_t)bytes + 1) : NULL;
  if (data == NULL) return reject(call, out, message, status, users != NULL);
  int code = receive_bytes(message, data, bytes, status);
  ffi_error *error = code == MPI_SUCCESS ? receive_from_memory(call, out, data, bytes, status, users)
                                         : call_fail_in(call, "MPI_Mrecv", code);
  free(data);
  return error;
}

ffi_error *receive_into(struct call *call, const struct buffer *out, const struct span *span, MPI_Message *message,
                        MPI_Status *status, MPI_Status *users) {
  int units = 0;
  call->timeline.from = status->MPI_SOURCE;
  call->timeline.tag = status->MPI_TAG;
  TRY_MPI(call, Get_count, status, span->type, &units);
  bool nobody = status->MPI_SOURCE == ABI_PROC_NULL, fits = units == span->count || nobody;
  if (call->labelled && !nobody) return receive_labelled(call, out, message, status, users);
  int64_t count = nobody ? 0 : fits ? out->count : message_count(status, element(out->type));
  if (!fits && (users == NULL || count < 0 || count > out->count))
    return reject(call, out, message, status, users != NULL);
  TRY_MPI(call, Mrecv, out->data, span->count, span->type, message, status);
  return finish_template(call, out, count, status, users);
}

ffi_error *receive_matched(struct call *call, const struct buffer *out, MPI_Message *message, MPI_Status *status) {
  struct span span = span_of(out->type, out->count);
  if (span.code != MPI_SUCCESS) {
    message_discard(message, message_bytes(status));
    return call_fail_mpi(call, span.code);
  }
  ffi_error *error = receive_into(call, out, &span, message, status, NULL);
  span_free(&span);
  return error;
}

ffi_error *fail_planned(const struct call *c, const struct peer *peer, int64_t bytes) {
  char sizes[80] = "";
  if (bytes != peer->bytes)
    snprintf(sizes, sizeof sizes, " (%" PRId64 " bytes, where %" PRId64 " of this call were expected)", bytes,
             peer->bytes);
  return call_fail(
      c, FFI_FAILED_PRECONDITION,
      "rank %d has sent something else%s. All ranks must make the same calls in the same order, with arrays of the "
      "same "
      "dtypes and global shapes, and the same arguments. What jax.vmap maps on one rank must be mapped on all. "
      "JAXMPI_CHECK=1 reports where they differ, before anything is sent",
      peer->rank, sizes);
}
