// Activations of z = (x - mean) * scale + shift + residual. Those of a few operations are computed where z
// is, and of floats the ones that are met most, so that memory and arithmetic work at the same time. For all others a
// chunk of values at a time, which stays in the L1 cache, goes through a loop that is compiled once for each
// activation, and not once more for each dtype and layout. Chunks are short, since memory waits meanwhile.

constexpr int64_t kChunk = 128;

// Room for the last vector of a row that ends within it.
template <typename A>
struct alignas(64) Chunk {
  A values[kChunk + kWidth<A>] = {};
};

template <bool kStream, typename T, typename A>
void write(const A* chunk, T* y, int64_t n) {
  for_each_column<A>(
      n, [&](int64_t j, const auto& access) { access.template store<kStream>(y + j, load_bytes<Vec<A>>(chunk + j)); });
}

template <typename T, typename A>
void write_gradient(const A* derivatives, const T* dy, T* g, int64_t n) {
  for_each_column<A>(n, [&](int64_t j, const auto& access) {
    access.fetch(dy + j + kAhead);
    access.store(g + j, access.load(dy + j) * load_bytes<Vec<A>>(derivatives + j));
  });
}

// Writes z to a chunk. Where n is not a number of whole vectors, what is behind the last value changes too.
template <bool kColumns, typename T, typename A>
void write_normalized(const T* x, const T* residual, A* chunk, int64_t n, const NormalizeFactors<A>& factors,
                      int64_t first) {
  for_each_normalized<kColumns>(x, residual, n, factors, first,
                                [&](int64_t j, Vec<A> z, const auto&) { narrow(chunk + j, z); });
}

// Calls body(row, rows, begin, count) for chunks of rows of n values: several whole rows, or a part of one.
template <typename Body>
BAGUA_SYNCBN_IN_LOOPS void for_each_chunk(int64_t rows, int64_t n, const Body& body) {
  const int64_t at_once = n < kChunk ? kChunk / n : 1;
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t some = row + at_once < rows ? at_once : rows - row;
    for (int64_t begin = 0; begin < n; begin += kChunk) body(row, some, begin, n - begin < kChunk ? n - begin : kChunk);
  }
}

// y = act(z) of rows as for normalize_lines.
template <bool kColumns, typename T, typename A>
inline void act_lines(const T* x, T* y, int64_t rows, int64_t n, int64_t channel, int64_t channels,
                      const NormalizeFactors<A>& factors, const Epilogue<T>& epilogue) {
  const Functions<kColumns, T, A>& functions = kFunctions<kColumns, T, A>[epilogue.act.code];
  if (const auto values = functions.rows[factors.stream]) {
    values(x, epilogue.residual, y, rows, n, channel, channels, factors, epilogue.act.parameter);
    if (factors.stream) end_streaming();
    return;
  }
  Chunk<A> chunk;
  for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
    const int64_t offset = row * n + begin;
    for (int64_t r = 0; r < some; ++r) {
      const int64_t first = kColumns ? begin : (channel + row + r) % channels, start = offset + r * n;
      write_normalized<kColumns>(x + start, epilogue.from(start).residual, chunk.values + r * count, count, factors,
                                 first);
    }
    functions.values(chunk.values, some * count, epilogue.act.parameter);
    (factors.stream ? write<true, T, A> : write<false, T, A>)(chunk.values, y + offset, some * count);
  });
  if (factors.stream) end_streaming();
}

// Writes g = dy * act'(z), of rows that are `stride` apart, of one channel or of one value for each channel.
template <bool kColumns, typename T>
inline void act_grad_lines(const Gradients<T>& of, int64_t rows, int64_t n, int64_t stride, int64_t channel) {
  using A = Accumulate<T>;
  Chunk<A> chunk;
  for_each_chunk(rows, n, [&](int64_t row, int64_t some, int64_t begin, int64_t count) {
    for (int64_t r = 0; r < some; ++r) {
      const Gradients<T> line = of.from((row + r) * stride + begin);
      write_normalized<kColumns>(line.x, line.epilogue.residual, chunk.values + r * count, count, of.factors,
                                 kColumns ? begin : channel);
    }
    kFunctions<kColumns, T, A>[of.epilogue.act.code].derivatives(chunk.values, some * count, of.epilogue.act.parameter);
    for (int64_t r = 0; r < some; ++r) {
      const Gradients<T> line = of.from((row + r) * stride + begin);
      write_gradient(chunk.values + r * count, line.dy, line.g, count);
    }
  });
}
