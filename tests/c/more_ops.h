/* The bodies of more_ops.def. A negative factor is an error; `calls` becomes the factor. */
static ffi_error *factor_check(const struct call *c, const struct buffer *factor) {
  int32_t value;
  memcpy(&value, factor->data, sizeof value);
  return value < 0 ? call_fail(c, FFI_INVALID_ARGUMENT, "the factor is %d", (int)value) : NULL;
}

static void count_call(const struct buffer *factor, const struct buffer *calls) {
  memcpy(calls->data, factor->data, sizeof(int32_t));
}

ffi_error *BODY(sums)(struct call *c) {
  ARGUMENTS(sums, c);
  PASS(factor_check(c, b.factor));
  BEGIN(c, Allreduce, "with");
  FOR_CHUNKS(c, b.a->count, i, n)
  TRY(c, mpi.Allreduce(chunk_of(b.a, b.sum_a, i), buffer_at(b.sum_a, i), (int)n, element(b.a->type), handle_of(a.op),
                       comm));
  FOR_CHUNKS(c, b.b->count, i, n)
  TRY(c, mpi.Allreduce(chunk_of(b.b, b.sum_b, i), buffer_at(b.sum_b, i), (int)n, element(b.b->type), handle_of(a.op),
                       comm));
  count_call(b.factor, b.calls);
  return NULL;
}

ffi_error *BODY(stacks)(struct call *c) {
  ARGUMENTS(stacks, c);
  (void)a;
  BEGIN(c, Allgather, "with");
  struct span s = span_of(b.a->type, b.a->count);
  TRY_SPAN(c, s, mpi.Allgather(b.a->data, s.count, s.type, b.all_a->data, s.count, s.type, comm));
  s = span_of(b.b->type, b.b->count);
  TRY_SPAN(c, s, mpi.Allgather(b.b->data, s.count, s.type, b.all_b->data, s.count, s.type, comm));
  return NULL;
}

ffi_error *BODY(each)(struct call *c) {
  ARGUMENTS(each, c);
  PASS(factor_check(c, b.factor));
  BEGIN(c, Allreduce, "with");
  for (int k = 0; b.in + k < b.factor; k++) FOR_CHUNKS(c, b.in[k].count, i, n)
  TRY(c, mpi.Allreduce(chunk_of(&b.in[k], &b.out[k], i), buffer_at(&b.out[k], i), (int)n, element(b.in[k].type),
                       handle_of(a.op), comm));
  count_call(b.factor, b.calls);
  return NULL;
}
