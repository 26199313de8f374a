// Records that threads share without a lock: published once, never changed, freed only with their table.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include "pack/layout.h"

namespace opgraph {

// Stores `fresh` in the first free place; takes ownership, returns what to use (null when the table is full).
template <class T, size_t N>
const T* publish(std::atomic<const T*> (&table)[N], std::mutex& mutex, std::unique_ptr<T> fresh) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& place : table)
    if (!place.load(std::memory_order_relaxed)) {
      const T* kept = fresh.release();
      place.store(kept, std::memory_order_release);
      return kept;
    }
  return nullptr;
}

// The record of a layout that was accepted before, or null.
inline const SeenLayout* find_seen(const OperandSpec& spec, const BufferLayout& b) {
  for (auto& place : spec.seen) {
    const SeenLayout* s = place.load(std::memory_order_acquire);
    if (!s) return nullptr;
    if (s->rank != b.rank) continue;
    int64_t difference = 0;
    for (int i = 0; i < b.rank; i++) difference |= (s->dims[i] ^ b.dims[i]) | (s->strides[i] ^ b.strides[i]);
    if (!difference) return s;
  }
  return nullptr;
}

// Remembers an accepted layout of at most kMaxRank axes; further ones are matched again on each call.
inline void publish_seen(OperandSpec& spec, const BufferLayout& b, int64_t bytes, std::mutex& mutex) {
  if (b.rank > kMaxRank) return;
  auto fresh = std::make_unique<SeenLayout>();
  fresh->rank = b.rank;
  for (int i = 0; i < b.rank; i++) fresh->dims[i] = b.dims[i], fresh->strides[i] = b.strides[i];
  fresh->bytes = bytes;
  publish(spec.seen, mutex, std::move(fresh));
}

}  // namespace opgraph
