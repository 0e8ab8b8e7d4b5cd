// Ranks that exchange messages through a segment, each value of which is checked. Ends with status 0 if all was right.
//
//   stress threads RANKS MESSAGES SEED     ranks are threads, for ThreadSanitizer; run ahead and late at random
//   stress sleepers RANKS MESSAGES SEED    the same, on few cores: whoever waits sleeps at once; says if none is woken
//   stress deaths                          ranks are processes that end while another one waits for them
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "exchange/segment.h"

using namespace bagua_syncbn::exchange;
using Clock = std::chrono::steady_clock;

namespace {

[[noreturn]] void wrong(const std::string& what) {
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::_Exit(1);
}

void expect(bool holds, const std::string& what) {
  if (!holds) wrong(what);
}

template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double value_of(int rank, uint32_t message, int64_t i) {
  return static_cast<double>((message * 31 + rank * 7 + i) % 1000);
}

// Each rank knows the messages of all ranks by their numbers.
Header header_of(uint32_t message) {
  std::minstd_rand random(message * 2654435761u + 1);
  random.discard(4);
  Header header;
  header.kind = static_cast<int32_t>(random() % 2);
  header.itemsize = random() % 2 ? 8 : 4;
  header.numel = random() % 8 == 0 ? kSlotBytes / header.itemsize : random() % 40;
  return header;
}

template <typename T>
void send(Rank& rank, uint32_t message, const Header& header, std::vector<double>& memory) {
  T* values = reinterpret_cast<T*>(memory.data());
  for (int64_t i = 0; i < header.numel; ++i) {
    values[i] = static_cast<T>(value_of(rank.rank(), message, i));
  }
  rank.publish(header, values);
}

template <typename T>
void check(const Rank& rank, uint32_t message, const Header& header, const std::vector<double>& memory) {
  const T* values = reinterpret_cast<const T*>(memory.data());
  const int rows = header.kind == kGather ? rank.ranks() : 1;
  for (int row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < header.numel; ++i) {
      double expected = 0;
      const bool sums = header.kind == kSum;
      for (int r = sums ? 0 : row; r < (sums ? rank.ranks() : row + 1); ++r) {
        expected += value_of(r, message, i);
      }
      expect(values[row * header.numel + i] == expected, "value in message " + std::to_string(message));
    }
  }
}

void lose_time(std::minstd_rand& random) {
  if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  for (volatile unsigned i = 0; i < random() % 500; ++i) continue;
}

void run_rank(Rank& rank, uint32_t messages, unsigned seed) {
  std::minstd_rand random(seed * 97 + rank.rank() + 1);
  std::vector<double> source(kSlotBytes / 8), target(rank.ranks() * kSlotBytes / 8);
  Waiter waiter;
  uint32_t sent = 0, collected = 0;
  while (collected < messages) {
    lose_time(random);
    const uint32_t ahead = 1 + random() % kMostPending;
    while (sent < messages && sent - collected < ahead) {
      const Header header = header_of(sent);
      header.itemsize == 4 ? send<float>(rank, sent, header, source) : send<double>(rank, sent, header, source);
      ++sent;
      lose_time(random);
    }
    if (sent - collected == kMostPending) {
      expect(!error_of([&] { rank.publish(Header(), nullptr); }).empty(), "no message is refused");
    }
    rank.collect(target.data(), waiter);
    const Header header = header_of(collected);
    header.itemsize == 4 ? check<float>(rank, collected, header, target)
                         : check<double>(rank, collected, header, target);
    ++collected;
  }
}

void run_threads(int ranks, uint32_t messages, unsigned seed, double seconds) {
  const auto memory = Memory::make("stress", ranks);
  std::vector<std::unique_ptr<Rank>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<Rank>(memory, rank));
    all.back()->enter(false);
  }
  std::vector<std::thread> threads;
  for (auto& rank : all) {
    expect(rank->all_are_here(), "a rank is not here");
    rank->start(seconds);
    threads.emplace_back([&rank, messages, seed] { run_rank(*rank, messages, seed); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Runs `body` as rank 1, in a child; returns the error of rank 0, which waits for its message.
template <typename Body>
std::string error_beside(const Body& body, double seconds = 3) {
  const auto memory = Memory::make("deaths", 2);
  const pid_t child = fork();
  if (child == 0) {
    Rank rank(memory, 1);
    rank.enter(true);
    body(rank);
    _exit(0);
  }
  Rank rank(memory, 0);
  rank.enter(true);
  while (!rank.all_are_here()) std::this_thread::yield();
  rank.start(seconds);
  rank.publish(Header(), nullptr);
  Waiter waiter;
  const std::string error = error_of([&] { rank.collect(nullptr, waiter); });
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return error;
}

void sleep_for(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

void run_deaths() {
  const auto begin = Clock::now();
  const auto killed = [](Rank& rank) {
    if (fork() == 0) {  // a child of its own lives on
      expect(rank.is_in_child(), "a child takes itself for its parent");
      sleep(2);
      _exit(0);
    }
    sleep_for(50);
    raise(SIGKILL);
  };
  expect(error_beside(killed) == "rank 1 of the group has ended or closed its files", "a rank that was killed");
  expect(seconds_since(begin) < 2, "a rank that was killed is noticed late");
  for (int i = 0; i < 50; ++i) {
    const auto ends = [](Rank& rank) { rank.publish(Header(), nullptr); };
    expect(error_beside(ends) == "", "a rank that ends right after its last message");
  }
  const auto stopped = [](Rank& rank) {
    const pid_t self = getpid();
    if (fork() == 0) {
      sleep_for(400);
      kill(self, SIGCONT);
      _exit(0);
    }
    raise(SIGSTOP);
    rank.publish(Header(), nullptr);
  };
  expect(error_beside(stopped, 10) == "", "a rank that was stopped, and goes on");
  const auto leaves = [](Rank& rank) {
    sleep_for(50);
    rank.leave();
    pause();
  };
  expect(error_beside(leaves) == "rank 1 of the group has left it after an error, or destroyed it", "a rank that left");
  const auto late = Clock::now();
  const auto sleeps = [](Rank&) { pause(); };
  expect(error_beside(sleeps, 0.3) == "rank 1 of the group did not come within the time-out", "a rank that is late");
  expect(seconds_since(late) < 2, "a time-out is noticed late");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "deaths") return run_deaths(), 0;
  if (argc != 5) wrong("arguments");
  const int ranks = std::atoi(argv[2]);
  const auto messages = static_cast<uint32_t>(std::atol(argv[3]));
  if (mode == "threads") return run_threads(ranks, messages, std::atoi(argv[4]), 20), 0;
  if (mode != "sleepers") wrong("mode");
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof(one), &one);
  const auto begin = Clock::now();
  run_threads(ranks, messages, std::atoi(argv[4]), 20);
  // A slice of sleep takes 0.1 s.
  expect(seconds_since(begin) < 0.05 * messages, "sleepers are not woken");
}
