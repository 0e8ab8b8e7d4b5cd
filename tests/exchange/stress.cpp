// Ranks exchange messages through a segment and check each value. Exits with 0 on success.
//
//   stress threads RANKS MESSAGES SEED     ranks are threads, for ThreadSanitizer, with random delays
//   stress sleepers RANKS MESSAGES SEED    the same without spinning; also checks that sleepers are woken
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "exchange/segment.h"

using namespace bagua_syncbn::exchange;
using Clock = std::chrono::steady_clock;

namespace {

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::_Exit(1);
}

double value_of(int rank, uint32_t number, int64_t i) {
  return static_cast<double>((number * 31 + rank * 7 + i) % 1000);
}

// Message `number`, the same on all ranks.
Message message_of(uint32_t number) {
  std::minstd_rand random(number * 2654435761u + 1);
  random.discard(4);
  Message message;
  message.kind = static_cast<int32_t>(random() % 2);
  message.itemsize = random() % 2 ? 8 : 4;
  message.numel = random() % 8 == 0 ? kSlotBytes / message.itemsize : random() % 40;
  return message;
}

template <typename T>
void send(Segment& rank, uint32_t number) {
  const Message message = message_of(number);
  std::vector<T> values(message.numel + 1);
  for (int64_t i = 0; i < message.numel; ++i) values[i] = static_cast<T>(value_of(rank.rank(), number, i));
  rank.publish(message, values.data());
}

template <typename T>
void receive_and_check(Segment& rank, uint32_t number) {
  const Message message = message_of(number);
  const bool sums = message.kind == kSum;
  const int rows = sums ? 1 : rank.ranks();
  std::vector<T> values(rows * message.numel + 1);
  if (!rank.poll()) rank.sleep([] { return false; });
  rank.collect(values.data());
  for (int row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < message.numel; ++i) {
      double expected = sums ? 0 : value_of(row, number, i);
      for (int r = 0; sums && r < rank.ranks(); ++r) expected += value_of(r, number, i);
      expect(values[row * message.numel + i] == expected, "value in message " + std::to_string(number));
    }
  }
}

void delay(std::minstd_rand& random) {
  if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  for (volatile unsigned i = 0; i < random() % 500; ++i) continue;
}

void run_rank(Segment& rank, uint32_t messages, unsigned seed) {
  std::minstd_rand random(seed * 97 + rank.rank() + 1);
  for (uint32_t sent = 0, collected = 0; collected < messages; ++collected) {
    delay(random);
    const uint32_t ahead = 1 + random() % kMaxPending;
    for (; sent < messages && sent - collected < ahead; ++sent) {
      (message_of(sent).itemsize == 4 ? send<float> : send<double>)(rank, sent);
      delay(random);
    }
    (message_of(collected).itemsize == 4 ? receive_and_check<float> : receive_and_check<double>)(rank, collected);
  }
}

void run_threads(int ranks, uint32_t messages, unsigned seed, bool spins) {
  std::vector<std::unique_ptr<Segment>> all;
  const Waiting waiting{20, spins, false};
  for (int rank = 0; rank < ranks; ++rank)
    all.push_back(std::make_unique<Segment>("stress", ranks, waiting, rank, rank ? all[0]->place() : ""));
  std::vector<std::thread> threads;
  for (auto& rank : all) threads.emplace_back([&rank, messages, seed] { run_rank(*rank, messages, seed); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  expect(argc == 5, "arguments");
  const auto messages = static_cast<uint32_t>(std::atol(argv[3]));
  const auto begin = Clock::now();
  run_threads(std::atoi(argv[2]), messages, std::atoi(argv[4]), mode == "threads");
  // A sleeper that is not woken sleeps for 0.1 s.
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  if (mode == "sleepers") expect(seconds.count() < 0.05 * messages, "sleepers are not woken");
}
