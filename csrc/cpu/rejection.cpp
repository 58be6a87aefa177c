// SPDX-License-Identifier: Apache-2.0
// Verification of a request: rows in order, each read once, until the first rejection. The chunk sums of that pass
// also serve the sampling, which then reads one chunk again (and the chunks that hold candidates, to be exact).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../noise.h"
#include "kernels.h"
#include "operations.h"
#include "parallel.h"

namespace dflash::cpu {

namespace {

struct Scratch {
  std::vector<Chunk> chunks;
  std::vector<double> masses;
  std::vector<Correction> corrections;  // first q, later the residual, of the candidates
  alignas(64) float weights[chunk_size];
};

struct Judge {
  const Rejection& a;
  const Kernels& k;
  Scratch& s;
  int64_t request;
  float inverse_temperature = 0.0f;
  Row row{};

  double noise(int64_t slot, Stream stream) const {
    return uniform(a.seeds[request], a.anchor_positions[request], uint32_t(slot), stream);
  }

  // Reads a row; false where it has no finite logit (or is none of the logits).
  bool read(int64_t index) {
    if (index < 0 || index >= a.rows) return false;
    const int64_t bytes = a.type == Type::f32 ? 4 : 2, chunks = (a.vocabulary + chunk_size - 1) / chunk_size;
    row = {static_cast<const char*>(a.logits) + index * a.logits_row * bytes, a.vocabulary, a.type, inverse_temperature,
           0};
    s.chunks.resize(chunks);
    parallel(chunks, 16, [&](int64_t begin, int64_t end) { k.row_chunks(row, begin, end, s.chunks.data()); });
    row.max = -std::numeric_limits<float>::infinity();
    for (const Chunk& chunk : s.chunks) row.max = std::max(row.max, chunk.max);
    return row.max > -std::numeric_limits<float>::infinity();
  }

  double weight(float logit) const {
    if (logit == row.max) return 1.0;  // also where both are infinite
    return std::isnan(logit) ? 0.0 : k.exponential((logit - row.max) * inverse_temperature);
  }

  double total() const {
    double sum = 0.0;
    for (const Chunk& chunk : s.chunks) sum += chunk.sum * weight(chunk.max);
    return sum;
  }

  int64_t argmax() const {
    int64_t chunk = 0;
    while (s.chunks[chunk].max != row.max) ++chunk;
    return k.first_max(row, chunk);
  }

  // q of draft n over its present candidates into s.corrections; one-hot where the draft is none of them.
  double proposal(int64_t n, int64_t draft) {
    const int64_t* ids = a.candidate_ids + n * a.candidates;
    const float* scores = a.candidate_scores + n * a.candidates;
    constexpr float large = std::numeric_limits<float>::max();
    const auto present = [&](int64_t c) { return ids[c] >= 0 && ids[c] < a.vocabulary && scores[c] >= -large; };
    float top = -large;
    for (int64_t c = 0; c < a.candidates; ++c)
      if (present(c)) top = std::max(top, std::min(scores[c], large));
    s.corrections.clear();
    float sum = 0.0f, of_draft = 0.0f;
    for (int64_t c = 0; c < a.candidates; ++c) {
      if (!present(c)) continue;
      const float q = k.exponential(std::min(scores[c], large) - top);
      s.corrections.push_back({ids[c], q});
      sum += q;
      if (ids[c] == draft) of_draft = q;
    }
    for (Correction& candidate : s.corrections) candidate.weight /= sum;
    if (of_draft > 0.0f) return of_draft / sum;
    s.corrections.assign(1, {draft, 1.0f});
    return 1.0;
  }

  // The inverse CDF of the row's weights with s.corrections in place; -1 where all are 0.
  int64_t sample(double u) {
    const int64_t chunks = int64_t(s.chunks.size()), count = int64_t(s.corrections.size());
    s.masses.resize(chunks);
    for (int64_t i = 0; i < chunks; ++i) s.masses[i] = s.chunks[i].sum * weight(s.chunks[i].max);
    for (const Correction& correction : s.corrections) {
      const int64_t chunk = correction.id / chunk_size;
      s.masses[chunk] = k.chunk_weights(row, chunk, s.corrections.data(), count, s.weights);
    }
    double all = 0.0, running = 0.0;
    for (double mass : s.masses) all += mass;
    if (!(all > 0.0)) return -1;
    int64_t chunk = -1;
    for (int64_t i = 0; i < chunks; ++i) {
      if (s.masses[i] <= 0.0) continue;
      if (chunk >= 0) running += s.masses[chunk];
      chunk = i;
      if (running + s.masses[i] > u * all) break;
    }
    k.chunk_weights(row, chunk, s.corrections.data(), count, s.weights);
    const int64_t n = std::min(chunk_size, a.vocabulary - chunk * chunk_size);
    int64_t last = -1;
    for (int64_t i = 0; i < n; ++i) {
      running += s.weights[i];
      if (s.weights[i] > 0.0f) last = i;
      if (running > u * all && last >= 0) break;
    }
    return last < 0 ? -1 : chunk * chunk_size + last;
  }

  // The row's token: its argmax, or a sample from p, or -1.
  int64_t token(double u) {
    if (inverse_temperature == 0.0f) return argmax();
    s.corrections.clear();
    return sample(u);
  }

  bool accept(int64_t n, int64_t slot) {
    const int64_t draft = a.draft_ids[n];
    if (inverse_temperature == 0.0f) return draft == argmax();
    if (draft < 0 || draft >= a.vocabulary) {
      s.corrections.clear();
      return false;
    }
    const double sum = total(), q = proposal(n, draft);
    if (noise(slot, accept_stream) * q < weight(k.logit(row, draft)) / sum) return true;
    for (Correction& candidate : s.corrections)
      candidate.weight = float(std::max(0.0, weight(k.logit(row, candidate.id)) - candidate.weight * sum));
    return false;
  }

  int64_t recover(int64_t slot) {
    const double u = noise(slot, recover_stream);
    if (inverse_temperature == 0.0f) return argmax();
    const int64_t recovered = sample(u);
    return recovered >= 0 ? recovered : token(u);
  }

  void run() {
    int32_t* out = a.output + request * (a.max_drafts + 1);
    std::fill(out, out + a.max_drafts + 1, -1);
    const int64_t first = a.cu_drafts[request];
    const int64_t drafts = std::min<int64_t>(a.cu_drafts[request + 1] - first, a.max_drafts);
    const float temperature = a.temperature[request];
    inverse_temperature = temperature > 0.0f ? std::min(1.0f / temperature, 1e30f) : 0.0f;
    for (int64_t i = 0; i < drafts; ++i) {
      a.accepted[request] = int32_t(i);
      if (!read(a.draft_rows[first + i])) return;
      if (!accept(first + i, i + 1)) {
        out[i] = int32_t(recover(i + 1));
        return;
      }
      out[i] = int32_t(a.draft_ids[first + i]);
    }
    a.accepted[request] = int32_t(std::max<int64_t>(drafts, 0));
    if (a.bonus_rows[request] >= 0 && read(a.bonus_rows[request]))
      out[drafts] = int32_t(token(noise(drafts + 1, bonus_stream)));
  }
};

}  // namespace

void reject_sparse(const Rejection& a) {
  const auto requests = [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t request = begin; request < end; ++request) Judge{a, kernels(), scratch, request}.run();
  };
  // Few requests: their rows are split over the threads instead.
  if (4 * a.batch < threads() || a.batch == 1) return requests(0, a.batch);
  parallel(a.batch, 1, requests);
}

}  // namespace dflash::cpu
