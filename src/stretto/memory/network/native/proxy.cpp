// SPDX-License-Identifier: Apache-2.0
// The proxy of puts between nodes: one thread of a rank's group, without Python and without CUDA.
//
// It does what proxy.py and sockets.py do, with the same descriptors (descriptors.py) and frames (frames.py), which
// those files describe. Counters and FIFO words are shared with other processes and with GPUs: they are loaded with
// acquire and stored with release.
//
// Who works: whoever holds `mutex_`, to which all state belongs, and which nobody holds while asleep. A caller that has
// posted sends what it can itself (`wake`), and one that waits (`pause`) receives and sends in the thread's place, so
// that a put passes no more threads than a message of a socket does. The thread meanwhile waits for wake-ups alone (it is
// parked), and watches the connections again a millisecond after the last caller left. Where kernels write to FIFOs,
// callers leave all work to the thread; and where there are cores enough, it leaves to a second one, the sender, what a
// connection has to send once that is much, so that each way has a core. The sender holds the mutex except in `sendmsg`.
//
// No wake-up is lost. Before the thread sleeps it sets `is_asleep_`, then looks at the FIFOs once more; whoever posts
// writes its descriptor, then reads `is_asleep_`, unless it has taken the mutex and looks at the FIFOs itself. Fences
// between the two make one of them see the other. What the thread finds or leaves for a caller that waits, it tells it
// (`nudge`); what a caller leaves, it or the thread finds (`wake`, and the end of `pause`).

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t kMagic = 0x50545253, kNoSignal = 0xFFFFFFFF;
constexpr uint64_t kMaxPutBytes = 1ull << 30, kPhase = 1ull << 63, kLocalRegions = 1ull << 22, kWindow = 1 << 16;
constexpr size_t kMaxStrangers = 64, kBuffersAtOnce = 64, kBatch = 256, kInboxBytes = 4096;
constexpr uint64_t kMaxOwed = 64;         // puts that are not acknowledged,
constexpr int kAtOnce = 1 << 18, kWorthWaiting = 1 << 14;  // bytes of a payload that are awaited before they are read
constexpr uint64_t kWorthAThread = 1 << 18;  // bytes that a connection has to send
constexpr double kAckSeconds = 0.001;     // and how long: a put of this rank's own acknowledges, too
constexpr double kMaxSilence = 5.0;       // or a quarter of the limit: then a frame finds out whether the peer hears
constexpr double kGreetingSeconds = 5.0, kFirstPause = 0.01, kLongestPause = 0.5, kCheckSeconds = 0.02;
constexpr double kSpinSeconds = 0.001;      // after work or a wake-up, for FIFOs that kernels write to
constexpr double kPollSeconds = 0.002;      // between looks at those FIFOs, later
constexpr double kLongestSleep = 0.5;
constexpr double kHoldSeconds = 0.001;      // after a caller's work, until the thread looks at connections again
constexpr double kLivelySeconds = 0.01;     // since then, before the thread sleeps longer than that while callers wait
constexpr timespec kLookForRoom{0, 2'000'000};
constexpr double kLookSeconds = 0.0002;     // of a caller who leaves the work to others

enum Call { kPolls, kSends, kReceives, kWakes, kCalls };
enum Kind : uint8_t { kHello = 1, kPut = 2, kAck = 3, kBye = 4 };

struct Frame {
  uint32_t magic = kMagic;
  uint8_t version = 1;
  uint8_t kind = 0;
  uint16_t zeros = 0;
  uint8_t token[16] = {};
  uint32_t source = 0, region = 0;
  uint64_t number = 0, received = 0, offset = 0;
  uint32_t size = 0, signal = kNoSignal;
};
static_assert(sizeof(Frame) == 64);

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Region {
  uint8_t* whole;
  uint64_t pad_bytes, size, signals;
  std::vector<uint8_t*> near;  // by rank; null where it is not mapped
};

struct Fifo {
  uint64_t* words;
  uint64_t capacity;
  uint64_t* tail;
  bool is_polled;
  uint64_t taken = 0;
};

struct Sent {
  Frame frame;
  const uint8_t* payload;
  uint64_t source_region;
};

struct Early {
  uint32_t region, signal;
};

struct Link {
  bool is_far = false, is_up = false;
  uint64_t sent = 0, received = 0, answered = 0;
  std::deque<Sent> unacknowledged;
  std::map<uint64_t, Early> early;
  std::string why = "it has not connected", failure;
  double since = now(), spoke = 0.0;  // spoke: the last frame to the peer
  double owed_since = 0.0;  // the first put that no frame has acknowledged yet has come; 0: there is none

  void answer() {
    answered = received;
    owed_since = 0.0;
  }
};

struct Part {
  Frame header;
  const uint8_t* payload;

  uint64_t size() const { return sizeof(Frame) + (payload ? header.size : 0); }
};

struct Connection {
  int fd = -1;
  int peer = -1;
  bool is_open = false, has_greeted = false, is_closed = false;

  void add(const Frame& frame, const uint8_t* payload) {
    outgoing.push_back({frame, payload});
    waiting += outgoing.back().size();
  }

  double began = now();
  std::deque<Part> outgoing;
  uint64_t written = 0, waiting = 0;             // bytes of the first part; of all parts that are left
  bool is_handed = false, is_sending = false;    // to the sender; which is in `sendmsg` with it
  Frame frame;
  uint64_t filled = 0;
  bool in_payload = false;
  uint8_t* target = nullptr;
  int awaited = 1;  // bytes that must have come for `ppoll` to say so
  uint8_t inbox[kInboxBytes];  // what has come behind the frame that is being received
  size_t begin = 0, end = 0;
};

struct Refused : std::string {
  using std::string::string;
  explicit Refused(std::string text) : std::string(std::move(text)) {}
};

bool parse_address(const std::string& host, int port, sockaddr_storage* out, socklen_t* length) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  memcpy(out, found->ai_addr, found->ai_addrlen);
  *length = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

class Proxy {
 public:
  Proxy(int rank, int world, const uint8_t* token, double limit, bool sends_apart)
      : rank_(rank), world_(world), limit_(limit), sends_apart_(sends_apart) {
    memcpy(token_, token, 16);
    links_.resize(world);
  }

  ~Proxy() {
    for (auto& connection : connections_) {
      if (connection->fd >= 0) ::close(connection->fd);
    }
    if (listener_ >= 0) ::close(listener_);
    if (wakes_ >= 0) ::close(wakes_);
    if (nudges_ >= 0) ::close(nudges_);
  }

  // Returns the port, or -errno.
  int listen_on(const std::string& host) {
    host_ = host;
    sockaddr_storage address{};
    socklen_t length;
    if (!parse_address(host, 0, &address, &length)) return -EINVAL;
    listener_ = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    wakes_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    nudges_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (listener_ < 0 || wakes_ < 0 || nudges_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        listen(listener_, std::max(128, 2 * world_)) != 0 ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      return -errno;
    }
    return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                               : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }

  void add_peer(int peer, const std::string& host, int port) {
    links_[peer].is_far = true;
    addresses_[peer] = {host, port};
    if (peer > rank_) retries_[peer] = {0.0, kFirstPause};
  }

  void start() {
    if (sends_apart_) sender_ = std::thread([this] { run_sender(); });
    thread_ = std::thread([this] { run(); });
  }

  void add_region(uint64_t number, Region region) {
    std::lock_guard lock(mutex_);
    regions_[number] = std::move(region);
    if (number < kLocalRegions) known_ = std::max(known_, number + 1);
  }

  void remove_region(uint64_t number, double seconds) {
    std::unique_lock lock(mutex_);
    wait_until(lock, seconds, [&] { return !reads(number); });
    auto found = regions_.find(number);
    if (found == regions_.end()) return;
    // Nothing reads or writes its memory from here on, whatever has not arrived.
    for (auto& link : links_) {
      if (std::any_of(link.unacknowledged.begin(), link.unacknowledged.end(), [&](const Sent& sent) {
            return sent.payload != nullptr && sent.source_region == number;
          })) {
        fail(&link - links_.data(), "its memory was freed before all had arrived");
      }
    }
    for (auto& connection : connections_) {
      uint8_t* begin = found->second.whole;
      uint8_t* end = begin + found->second.pad_bytes + found->second.size;
      if (connection->target >= begin && connection->target < end) connection->target = nullptr;
      if (std::any_of(connection->outgoing.begin(), connection->outgoing.end(),
                      [&](const Part& part) { return part.payload >= begin && part.payload < end; })) {
        close_connection(connection.get(), "memory was freed that it was to send");
      }
    }
    while (std::any_of(connections_.begin(), connections_.end(),
                       [](const auto& connection) { return connection->is_closed && connection->is_sending; })) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(10));
      lock.lock();
    }
    regions_.erase(found);
  }

  void add_fifo(Fifo fifo) {
    std::lock_guard lock(mutex_);
    fifos_.push_back(fifo);
    if (!fifo.is_polled) posted_ = fifo;
    has_polled_ = has_polled_ || fifo.is_polled;
    kick();
  }

  // What the FIFO has goes out first: peers may wait for it.
  void remove_fifo(const uint64_t* words) {
    std::lock_guard lock(mutex_);
    while (read_fifos()) {
    }
    kick();
    std::erase_if(fifos_, [&](const Fifo& fifo) { return fifo.words == words; });
    if (posted_.words == words) posted_ = {};
    has_polled_ = std::any_of(fifos_.begin(), fifos_.end(), [](const Fifo& fifo) { return fifo.is_polled; });
  }

  // Writes the descriptor of a put with this ticket (descriptors.py) into the host's FIFO, and wakes. Returns what `wake`
  // does; -1 if the FIFO is full, or a number does not fit its bits.
  int put(uint64_t ticket, uint64_t peer, uint64_t source_region, uint64_t source, uint64_t region, uint64_t offset,
          uint64_t size, uint64_t signal) {
    uint64_t kind = signal == kNoSignal ? 2 : 1;
    if (kind == 2) signal = 0;
    if ((peer | signal) >> 20 || (source_region | region) >> 23 || (source | offset | size) >> 40 ||
        posted_.capacity <= ticket - (posted_.tail ? std::atomic_ref(*posted_.tail).load(std::memory_order_acquire) : 0)) {
      return -1;
    }
    uint64_t* slot = posted_.words + ticket % posted_.capacity * 4;
    uint64_t phase = ticket / posted_.capacity & 1 ? 0 : kPhase;
    std::atomic_ref(slot[3]).store(size | phase, std::memory_order_relaxed);
    std::atomic_ref(slot[2]).store(region << 40 | offset | phase, std::memory_order_relaxed);
    std::atomic_ref(slot[1]).store(source_region << 40 | source | phase, std::memory_order_relaxed);
    std::atomic_ref(slot[0]).store(kind << 60 | peer << 40 | signal << 20 | phase, std::memory_order_release);
    return wake();
  }

  // Called after a descriptor was written, and before a kernel that will write some. Sends here what can be sent now; the
  // rest is left to a caller that has just worked and may again, or to the thread. Returns whether a peer may be lost.
  bool wake() {
    ++asked_;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!has_polled_) {
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock) {
        if (read_fifos()) flush_all();
        if (drivers_ > 0 && has_outgoing()) nudge();
        // A parked thread ends its sleep within two milliseconds.
        if (drivers_ > 0 || parked_until_ != 0.0 || !(has_outgoing() || has_descriptors())) return has_failed_;
      }
    }
    kick();
    return has_failed_;
  }

  // Ends the thread's sleep.
  void kick() {
    if (!is_asleep_.load(std::memory_order_relaxed)) return;
    ++calls_[kWakes];
    uint64_t one = 1;
    (void)!write(wakes_, &one, sizeof one);  // a full counter wakes anyway
  }

  // Ends the sleep of a caller in `pause`.
  void nudge() {
    ++calls_[kWakes];
    uint64_t one = 1;
    (void)!write(nudges_, &one, sizeof one);
  }

  // Waits until a signal has counted up, or a peer was lost, since the last call, or some seconds have passed; works in
  // the thread's place meanwhile.
  void pause(double seconds) {
    std::unique_lock lock(mutex_);
    if (has_polled_ || drivers_ > 0 || is_closing_) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, kLookSeconds)));
      return;
    }
    ++drivers_;
    double deadline = now() + seconds;
    while (counted_ == reported_ && !is_closing_) {
      double left = deadline - now();
      take_turn(lock, std::max(left, 0.0), false);
      if (left <= 0.0) break;
    }
    reported_ = counted_;
    --drivers_;
    driven_ = now();
    if (parked_until_ > driven_ + 2 * kHoldSeconds) kick();
  }

  // Pauses until a counter has reached a target, a peer was lost, or some seconds have passed. Returns whether it has.
  bool await(uint32_t* counter, uint32_t target, double seconds) {
    auto has_come = [&] { return int32_t(std::atomic_ref(*counter).load(std::memory_order_acquire) - target) >= 0; };
    double deadline = 0.0;
    while (!has_come()) {
      double time = now();
      if (deadline == 0.0) deadline = time + seconds;
      if (time >= deadline || has_failed_) return false;
      pause(deadline - time);
    }
    return true;
  }

  std::string failure(int peer) {
    if (!has_failed_) return "";  // without the mutex, which the thread holds while it sends
    std::lock_guard lock(mutex_);
    return broken_.empty() ? links_[peer].failure : broken_;
  }

  // System calls of the thread so far: polls, sends, receives, and wake-ups of others.
  void count_calls(uint64_t* counts) {
    std::lock_guard lock(mutex_);
    std::copy(std::begin(calls_), std::end(calls_), counts);
  }

  void drop_payloads(bool drops) {
    std::lock_guard lock(mutex_);
    drops_ = drops;
  }

  void break_connection(int peer) {
    std::lock_guard lock(mutex_);
    if (Connection* connection = find(peer)) close_connection(connection, "a test broke it");
    kick();
  }

  void close(double seconds) {
    {
      std::unique_lock lock(mutex_);
      if (is_closing_) return;
      while (read_fifos()) {
      }
      kick();
      wait_until(lock, seconds, [&] {
        return std::all_of(links_.begin(), links_.end(), [](const Link& link) { return link.unacknowledged.empty(); });
      });
      is_closing_ = true;
      has_backlog_.notify_one();
      kick();
      if (drivers_ > 0) nudge();
    }
    if (thread_.joinable()) thread_.join();
    for (std::unique_lock lock(mutex_); drivers_ > 0; lock.lock()) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

 private:
  template <typename Condition>
  void wait_until(std::unique_lock<std::mutex>& lock, double seconds, Condition holds) {
    double deadline = now() + seconds;
    while (!holds() && now() < deadline) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      lock.lock();
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!is_closing_) take_turn(lock, kLongestSleep, true);
    lock.unlock();
    if (sender_.joinable()) sender_.join();
    lock.lock();
    for (auto& connection : connections_) connection->is_handed = false;
    for (int peer = 0; peer < world_; ++peer) {
      if (links_[peer].is_up) send(peer, make(kBye, links_[peer].received), nullptr);
    }
    double deadline = now() + 1.0;
    while (now() < deadline && std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
             return connection->has_greeted && !connection->outgoing.empty();
           })) {
      exchange(lock, 0.01, true);
      sweep();
    }
    for (auto& connection : connections_) connection->is_closed = true;
    sweep();
  }

  // Sends what connections have handed over, until a call waits for room for it.
  void run_sender() {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_backlog_.wait(lock, [this] {  // told while this thread is in `sendmsg`, without the mutex, it looks again
        return is_closing_ || std::any_of(connections_.begin(), connections_.end(), [](const auto& each) {
                 return each->is_handed && !each->is_closed;
               });
      });
      if (is_closing_) return;
      std::vector<pollfd> full;
      bool has_sent = false;
      for (size_t index = 0; index < connections_.size(); ++index) {
        Connection* connection = connections_[index].get();
        if (!connection->is_handed || connection->is_closed) continue;
        connection->is_sending = true;
        bool has_room = false;
        try {
          has_room = send_some(connection, &lock);
          connection->is_sending = false;
        } catch (const Refused& why) {
          connection->is_sending = false;
          close_connection(connection, why);
        }
        if (connection->outgoing.empty()) connection->is_handed = false;
        has_sent = has_sent || has_room;
        if (!has_room && !connection->is_closed) full.push_back({connection->fd, POLLOUT, 0});
      }
      if (has_sent || full.empty()) continue;
      lock.unlock();
      ++calls_[kPolls];
      (void)ppoll(full.data(), full.size(), &kLookForRoom, nullptr);
      lock.lock();
    }
  }

  void take_turn(std::unique_lock<std::mutex>& lock, double seconds, bool is_thread) {
    bool was_busy = read_fifos();
    if (seen_ != asked_) {  // a kernel that puts may be about to run
      seen_ = asked_;
      worked_ = now();
    }
    if (was_busy) flush_all();
    open_due();
    was_busy |= exchange(lock, std::min(seconds, choose_sleep(was_busy ? now() : worked_)), is_thread);
    acknowledge();
    check_limits();
    sweep();
    if (was_busy) worked_ = now();
    if (is_thread && drivers_ > 0 && (counted_ != reported_ || has_outgoing())) nudge();
  }

  bool has_outgoing() {
    return std::any_of(connections_.begin(), connections_.end(),
                       [](const auto& each) { return !each->is_closed && !each->is_handed && !each->outgoing.empty(); });
  }

  double choose_sleep(double worked) {
    if (has_polled_ && now() - worked < kSpinSeconds) return 0.0;
    double seconds = has_polled_ ? kPollSeconds : kLongestSleep;  // what has come meanwhile ends it at once
    for (const Link& link : links_) {
      if (link.owed_since != 0.0) seconds = std::min(seconds, kAckSeconds);
      if (link.is_far && (!link.unacknowledged.empty() || !link.is_up)) seconds = std::min(seconds, kCheckSeconds);
    }
    return seconds;
  }

  bool has_descriptors() {
    return std::any_of(fifos_.begin(), fifos_.end(), [](const Fifo& fifo) {
      uint64_t word = std::atomic_ref(fifo.words[fifo.taken % fifo.capacity * 4]).load(std::memory_order_acquire);
      return (word & kPhase) == (fifo.taken / fifo.capacity & 1 ? 0 : kPhase);
    });
  }

  // FIFO to links.

  bool read_fifos() {
    bool was_busy = false;
    for (auto& fifo : fifos_) {
      for (size_t count = 0; count < kBatch; ++count) {
        if (std::any_of(links_.begin(), links_.end(),
                        [](const Link& link) { return link.unacknowledged.size() >= kWindow; })) {
          break;
        }
        uint64_t* slot = fifo.words + fifo.taken % fifo.capacity * 4;
        uint64_t phase = fifo.taken / fifo.capacity & 1 ? 0 : kPhase;
        uint64_t words[4];
        bool is_complete = true;
        for (int index = 0; index < 4; ++index) {
          words[index] = std::atomic_ref(slot[index]).load(std::memory_order_acquire);
          is_complete &= (words[index] & kPhase) == phase;
        }
        if (!is_complete) break;
        was_busy = true;
        ++fifo.taken;
        std::atomic_ref(*fifo.tail).store(fifo.taken, std::memory_order_release);
        std::string problem = post(words);
        if (!problem.empty() && broken_.empty()) {
          broken_ = "a descriptor is invalid: " + problem;
          has_failed_ = true;
        }
      }
    }
    return was_busy;
  }

  std::string post(const uint64_t* words) {
    constexpr uint64_t kOffset = (1ull << 40) - 1, kBits20 = (1ull << 20) - 1;
    uint64_t head = words[0] & ~kPhase, from = words[1] & ~kPhase, to = words[2] & ~kPhase, size = words[3] & ~kPhase;
    uint64_t kind = head >> 60, peer = head >> 40 & kBits20, signal = head >> 20 & kBits20;
    uint64_t source_region = from >> 40, source = from & kOffset, region = to >> 40, offset = to & kOffset;
    if (kind != 1 && kind != 2) return "there is no kind " + std::to_string(kind);
    if (size > kMaxPutBytes) return "a put of " + std::to_string(size) + " bytes";
    if (peer >= uint64_t(world_) || peer == uint64_t(rank_)) return "a put to rank " + std::to_string(peer);
    auto destination = regions_.find(region);
    if (region >= kLocalRegions || destination == regions_.end()) {
      return "a put into region " + std::to_string(region) + ", which is none of the group's";
    }
    Frame frame = make(kPut, 0);
    frame.region = region;
    frame.offset = offset;
    frame.size = size;
    frame.signal = kind == 1 ? signal : kNoSignal;
    if (std::string problem = find_outside(destination->second, frame); !problem.empty()) return problem;
    const uint8_t* payload = nullptr;
    if (size) {
      auto found = regions_.find(source_region);
      if (found == regions_.end() || size > found->second.size || source > found->second.size - size) {
        return "a put of " + std::to_string(size) + " bytes from " + std::to_string(source) + " of region " +
               std::to_string(source_region);
      }
      bool is_dropped = drops_ && size > sizeof(uint64_t);
      payload = is_dropped ? nullptr : found->second.whole + found->second.pad_bytes + source;
      if (is_dropped) frame.size = 0;
    }
    Link& link = links_[peer];
    if (!link.failure.empty()) return "";
    frame.number = ++link.sent;
    if (!link.is_far) return put_near(destination->second, peer, frame, payload);
    frame.received = link.received;
    if (link.unacknowledged.empty()) link.since = now();
    link.unacknowledged.push_back({frame, payload, source_region});
    link.answer();
    send(peer, frame, payload);
    return "";
  }

  std::string put_near(Region& region, uint64_t peer, const Frame& frame, const uint8_t* payload) {
    uint8_t* whole = region.near[peer];
    if (whole == nullptr) return "region " + std::to_string(frame.region) + " of rank " + std::to_string(peer) + " is not mapped here";
    if (payload) memcpy(whole + region.pad_bytes + frame.offset, payload, frame.size);
    count(whole, region, rank_, frame.signal);
    return "";
  }

  std::string find_outside(const Region& region, const Frame& frame) {
    if (frame.size > region.size || frame.offset > region.size - frame.size) {
      return "rank " + std::to_string(frame.source) + " puts " + std::to_string(frame.size) + " bytes at " +
             std::to_string(frame.offset) + " of region " + std::to_string(frame.region) + ", which has " +
             std::to_string(region.size);
    }
    if (frame.signal != kNoSignal && frame.signal >= region.signals) {
      return "rank " + std::to_string(frame.source) + " counts up signal " + std::to_string(frame.signal) +
             " of region " + std::to_string(frame.region) + ", which has " + std::to_string(region.signals);
    }
    return "";
  }

  // Only this proxy counts for a far peer, and the peer's proxy alone for a near one.
  void count(uint8_t* whole, const Region& region, uint64_t source, uint32_t signal) {
    if (signal == kNoSignal) return;
    std::atomic_ref counter(reinterpret_cast<uint32_t*>(whole)[source * region.signals + signal]);
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    ++counted_;
  }

  bool reads(uint64_t number) {
    for (auto& link : links_) {
      for (auto& sent : link.unacknowledged) {
        if (sent.payload && sent.source_region == number) return true;
      }
    }
    return false;
  }

  void acknowledge() {
    for (int peer = 0; peer < world_; ++peer) {
      Link& link = links_[peer];
      if (link.is_up && link.answered < link.received &&
          (link.received - link.answered >= kMaxOwed || now() - link.owed_since >= kAckSeconds)) {
        link.answer();
        send(peer, make(kAck, link.received), nullptr);
      }
    }
    flush_all();
  }

  void flush_all() {
    for (auto& connection : connections_) {
      try {
        flush(connection.get());
      } catch (const Refused& why) {
        close_connection(connection.get(), why);
      }
    }
  }

  void check_limits() {
    double time = now();
    if (time - checked_ < kCheckSeconds) return;
    checked_ = time;
    for (auto& each : connections_) {
      if (!each->has_greeted && each->began < time - kGreetingSeconds) close_connection(each.get(), "it did not greet");
    }
    for (int peer = 0; peer < world_; ++peer) {
      Link& link = links_[peer];
      if (!link.is_far || !link.failure.empty()) continue;
      // Of a connection that the peer has lost, which this side does not know, an answer tells.
      if (link.is_up && time - link.spoke > std::min(limit_ / 4, kMaxSilence)) send(peer, make(kAck, link.received), nullptr);
      double waited = time - link.since;
      if (waited <= limit_) continue;
      char text[64];
      snprintf(text, sizeof text, "%.3g s", waited);
      if (!link.is_up) {
        fail(peer, std::string("there was no connection for ") + text + ": " + link.why);
      } else if (!link.unacknowledged.empty()) {
        fail(peer, std::string("it has acknowledged nothing for ") + text);
      }
    }
  }

  void fail(int peer, const std::string& why) {
    Link& link = links_[peer];
    if (link.failure.empty()) link.failure = why;
    has_failed_ = true;
    ++counted_;  // who waits, looks
    link.is_up = false;
    link.unacknowledged.clear();
    link.early.clear();
    addresses_.erase(peer);
    if (Connection* connection = find(peer)) close_connection(connection, "it was given up");
    retries_.erase(peer);
  }

  // Connections.

  Frame make(uint8_t kind, uint64_t received) {
    Frame frame;
    frame.kind = kind;
    memcpy(frame.token, token_, 16);
    frame.source = rank_;
    frame.received = received;
    return frame;
  }

  Connection* find(int peer) {
    for (auto& connection : connections_) {
      if (connection->peer == peer && !connection->is_closed) return connection.get();
    }
    return nullptr;
  }

  void send(int peer, const Frame& frame, const uint8_t* payload) {
    Connection* connection = find(peer);
    if (!connection || !connection->has_greeted) return;
    connection->add(frame, payload);
    links_[peer].spoke = now();
  }

  void open_due() {
    if (retries_.empty()) return;
    double time = now();
    for (auto& [peer, retry] : retries_) {
      auto& [due, pause] = retry;
      if (time < due) continue;
      due = time + pause;
      pause = std::min(2 * pause, kLongestPause);
      if (find(peer)) continue;
      auto& [host, port] = addresses_[peer];
      sockaddr_storage address{}, own{};
      socklen_t length, own_length;
      if (!parse_address(host, port, &address, &length)) continue;
      int fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      if (fd < 0) {
        links_[peer].why = strerror(errno);
        continue;
      }
      if (parse_address(host_, 0, &own, &own_length) && own.ss_family == address.ss_family) {
        (void)bind(fd, reinterpret_cast<sockaddr*>(&own), own_length);
      }
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 && errno != EINPROGRESS) {
        links_[peer].why = strerror(errno);
        ::close(fd);
        continue;
      }
      add(fd, peer, false);
    }
  }

  void add(int fd, int peer, bool is_open) {
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    auto connection = std::make_unique<Connection>();
    connection->fd = fd;
    connection->peer = peer;
    connection->is_open = is_open;
    connections_.push_back(std::move(connection));
  }

  void accept_one() {
    int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      // Of too many open files, for example: the connection stays, and would end every sleep.
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      accepts_from_ = now() + kFirstPause;
      for (int peer = 0; peer < rank_; ++peer) {
        if (!links_[peer].is_up) links_[peer].why = std::string("none can be accepted: ") + strerror(errno);
      }
      return;
    }
    add(fd, -1, true);
    size_t strangers = 0;
    Connection* oldest = nullptr;
    for (auto& connection : connections_) {
      if (connection->peer >= 0 || connection->is_closed) continue;
      ++strangers;
      if (!oldest || connection->began < oldest->began) oldest = connection.get();
    }
    if (strangers > kMaxStrangers) close_connection(oldest, "too many have not greeted");
  }

  void close_connection(Connection* connection, const std::string& why) {
    if (connection->is_closed) return;
    connection->is_closed = true;
    connection->target = nullptr;
    if (connection->is_sending) {  // `sweep` closes it: another file may get its number
      (void)shutdown(connection->fd, SHUT_RDWR);
    } else {
      ::close(connection->fd);
      connection->fd = -1;
    }
    int peer = connection->peer;
    if (peer < 0 || find(peer)) return;
    if (peer > rank_ && addresses_.count(peer) && !retries_.count(peer)) {
      retries_[peer] = {now() + kFirstPause, kFirstPause};
    }
    Link& link = links_[peer];
    if (link.is_up) link.since = now();
    link.is_up = false;
    link.why = why;
    if (!link.failure.empty()) fail(peer, link.failure);
  }

  void sweep() {
    swept_ += std::erase_if(connections_, [](const auto& connection) {
      if (!connection->is_closed || connection->is_sending) return false;
      if (connection->fd >= 0) ::close(connection->fd);
      return true;
    });
  }

  // Waits for events without the mutex, then serves them. Returns whether any peer sent anything. While a caller works,
  // or has just done so, the thread waits for wake-ups alone.
  bool exchange(std::unique_lock<std::mutex>& lock, double seconds, bool is_thread) {
    sweep();
    static thread_local std::vector<pollfd> polled;
    static thread_local std::vector<Connection*> served;
    polled.assign(1, {is_thread ? wakes_ : nudges_, POLLIN, 0});
    served.clear();
    double since = now() - driven_;
    bool is_parked = is_thread && !is_closing_ && !has_polled_ && (drivers_ > 0 || since < kHoldSeconds);
    if (is_parked) {
      seconds = since < kLivelySeconds ? std::min(seconds, kHoldSeconds) : seconds;
      parked_until_ = now() + seconds;
    } else {
      polled.push_back({now() < accepts_from_ ? -1 : listener_, POLLIN, 0});
      for (auto& connection : connections_) {
        if (connection->is_closed) continue;
        bool writes = !connection->is_open || (!connection->outgoing.empty() && !connection->is_handed);
        polled.push_back({connection->fd, short(POLLIN | (writes ? POLLOUT : 0)), 0});
        served.push_back(connection.get());
      }
    }
    if (is_thread && seconds > 0.0) {
      is_asleep_ = true;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (has_descriptors()) seconds = 0.0;
    }
    timespec pause{time_t(seconds), long((seconds - time_t(seconds)) * 1e9)};
    uint64_t swept = swept_;
    lock.unlock();
    ++calls_[kPolls];
    int ready = ppoll(polled.data(), polled.size(), &pause, nullptr);
    if (is_thread) is_asleep_ = false;
    lock.lock();
    if (is_thread) parked_until_ = 0.0;
    if (ready <= 0) return false;
    bool was_busy = false;
    if (polled[0].revents) {
      uint64_t count;
      ++calls_[kReceives];
      (void)!::read(polled[0].fd, &count, sizeof count);
    }
    if (is_parked || swept != swept_) return false;  // swept: some of `served` are gone; what came is seen again
    if (polled[1].revents) accept_one();
    for (size_t index = 0; index < served.size(); ++index) {
      short events = polled[index + 2].revents;
      if (!events || served[index]->is_closed) continue;
      was_busy |= serve(served[index], events);
    }
    return was_busy;
  }

  bool serve(Connection* connection, short events) {
    try {
      if (!connection->is_open) {
        int error = 0;
        socklen_t length = sizeof error;
        getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &length);
        if (error) throw Refused(strerror(error));
        if (!(events & POLLOUT)) return false;
        connection->is_open = true;
        greet(connection);
      }
      flush(connection);
      return (events & (POLLIN | POLLHUP | POLLERR)) && receive(connection);
    } catch (const Refused& why) {
      close_connection(connection, why);
      return true;
    }
  }

  void greet(Connection* connection) {
    connection->add(make(kHello, links_[connection->peer].received), nullptr);
  }

  void flush(Connection* connection) {
    while (!connection->is_closed && connection->is_open && !connection->is_handed && !connection->outgoing.empty()) {
      if (has_polled_ && sends_apart_ && !is_closing_ && connection->waiting >= kWorthAThread) {
        connection->is_handed = true;
        has_backlog_.notify_one();
      } else if (!send_some(connection, nullptr)) {
        return;
      }
    }
  }

  // Sends the first parts, without the mutex if its lock is given. Returns whether all of them went: there is room.
  bool send_some(Connection* connection, std::unique_lock<std::mutex>* lock) {
    iovec parts[2 * kBuffersAtOnce];
    size_t count = 0;
    ssize_t asked = 0;
    uint64_t skip = connection->written;
    for (size_t index = 0; index < std::min(connection->outgoing.size(), kBuffersAtOnce); ++index) {
      Part& part = connection->outgoing[index];  // stays where it is while others are added
      uint8_t* header = reinterpret_cast<uint8_t*>(&part.header);
      if (skip < sizeof(Frame)) {
        parts[count++] = {header + skip, sizeof(Frame) - skip};
        skip = 0;
      } else {
        skip -= sizeof(Frame);
      }
      if (part.payload && part.header.size > skip) {
        parts[count++] = {const_cast<uint8_t*>(part.payload) + skip, size_t(part.header.size - skip)};
      }
      skip = 0;
    }
    for (size_t index = 0; index < count; ++index) asked += parts[index].iov_len;
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    ++calls_[kSends];
    if (lock) lock->unlock();
    ssize_t sent = sendmsg(connection->fd, &message, MSG_NOSIGNAL);
    int error = errno;
    if (lock) lock->lock();
    if (connection->is_closed) return true;
    if (sent < 0) {
      if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) return false;
      throw Refused(strerror(error));
    }
    connection->written += sent;
    connection->waiting -= sent;
    while (!connection->outgoing.empty() && connection->written >= connection->outgoing.front().size()) {
      connection->written -= connection->outgoing.front().size();
      connection->outgoing.pop_front();
    }
    return sent == asked;
  }

  bool receive(Connection* connection) {
    bool was_busy = read(connection);
    if (connection->is_closed) return was_busy;
    // A large payload comes in many packets, each of which would end a sleep.
    int left = connection->in_payload ? int(std::min<uint64_t>(connection->frame.size - connection->filled, kAtOnce)) : 0;
    int awaited = left < kWorthWaiting ? 1 : left;
    if (awaited != connection->awaited &&
        setsockopt(connection->fd, SOL_SOCKET, SO_RCVLOWAT, &awaited, sizeof awaited) == 0) {
      connection->awaited = awaited;
    }
    return was_busy;
  }

  // Receives what has come, up to some reads, so that others have their turn. A read takes the rest of a payload to its
  // place, and the frames behind it, if they are small, into the inbox.
  bool read(Connection* connection) {
    static thread_local uint8_t discarded[1 << 16];
    for (size_t turn = 0; turn < kBuffersAtOnce; ++turn) {
      iovec parts[2];
      size_t count = 0, room = connection->in_payload ? connection->frame.size - connection->filled : 0;
      bool is_dropped = connection->in_payload && !connection->target;
      if (is_dropped) room = std::min(room, sizeof discarded);
      if (room) parts[count++] = {is_dropped ? discarded : connection->target + connection->filled, room};
      parts[count++] = {connection->inbox, is_dropped ? 0 : kInboxBytes};
      ++calls_[kReceives];
      ssize_t got = readv(connection->fd, parts, count);
      if (got < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return true;
        throw Refused(strerror(errno));
      }
      if (got == 0) throw Refused("the peer has closed it");
      size_t placed = std::min<size_t>(got, room);
      connection->filled += placed;
      connection->begin = 0;
      connection->end = got - placed;
      while (take_frame(connection)) {
      }
      bool is_drained = size_t(got) < room + parts[count - 1].iov_len;
      if (connection->is_closed || is_drained) return true;
    }
    return true;
  }

  // Takes from the inbox what belongs to the current frame. Returns whether it is whole, and another may follow.
  bool take_frame(Connection* connection) {
    auto take = [&](uint8_t* to, size_t room) {
      size_t count = std::min(room, connection->end - connection->begin);
      if (to) memcpy(to, connection->inbox + connection->begin, count);
      connection->begin += count;
      connection->filled += count;
    };
    if (!connection->in_payload) {
      take(reinterpret_cast<uint8_t*>(&connection->frame) + connection->filled, sizeof(Frame) - connection->filled);
      if (connection->filled < sizeof(Frame)) return false;
      read_header(connection);
      connection->in_payload = true;
      connection->filled = 0;
    }
    uint8_t* target = connection->target;
    take(target ? target + connection->filled : nullptr, connection->frame.size - connection->filled);
    if (connection->filled < connection->frame.size) return false;
    connection->in_payload = false;
    connection->target = nullptr;
    connection->filled = 0;
    if (connection->frame.kind != kHello) arrived(connection->frame);
    return !connection->is_closed;  // it may have said goodbye
  }

  void read_header(Connection* connection) {
    Frame& frame = connection->frame;
    if (frame.magic != kMagic || frame.version != 1 || frame.zeros) {
      throw Refused("it is no frame of this version of Stretto");
    }
    uint8_t difference = 0;  // in constant time
    for (int index = 0; index < 16; ++index) difference |= frame.token[index] ^ token_[index];
    if (difference) throw Refused("it has not the job's token");
    if (frame.kind < kHello || frame.kind > kBye) throw Refused("there is no such kind of frames");
    if (frame.size > kMaxPutBytes || (frame.size && frame.kind != kPut)) throw Refused("a frame of a wrong size");
    if (!connection->has_greeted) {
      read_greeting(connection);
    } else if (frame.kind == kHello || int64_t(frame.source) != connection->peer) {
      throw Refused("a frame of rank " + std::to_string(frame.source) + " on the connection of rank " +
                    std::to_string(connection->peer));
    } else if (frame.kind == kPut) {
      connection->target = place(frame);
    }
  }

  void read_greeting(Connection* connection) {
    Frame& frame = connection->frame;
    if (frame.kind != kHello) throw Refused("its first frame is no greeting");
    int peer = frame.source < uint32_t(world_) ? int(frame.source) : -1;
    if (peer < 0 || !addresses_.count(peer) || (connection->peer >= 0 && connection->peer != peer)) {
      throw Refused("a rank greets that is no peer here");
    }
    if (connection->peer < 0) {
      if (peer > rank_) throw Refused("a rank connects that is to be connected to");
      if (Connection* old = find(peer)) close_connection(old, "the peer has connected anew");
      connection->peer = peer;
      greet(connection);
    }
    connection->has_greeted = true;
    retries_.erase(peer);
    Link& link = links_[peer];
    if (frame.received > link.sent) throw Refused("it greets with a put that was never sent");
    forget_received(link, frame.received);
    link.is_up = true;
    link.since = now();
    link.answer();
    for (auto& sent : link.unacknowledged) {
      sent.frame.received = link.received;
      connection->add(sent.frame, sent.payload);
    }
    flush(connection);
  }

  static bool forget_received(Link& link, uint64_t received) {
    bool has_progressed = false;
    while (!link.unacknowledged.empty() && link.unacknowledged.front().frame.number <= received) {
      link.unacknowledged.pop_front();
      has_progressed = true;
    }
    return has_progressed;
  }

  // A peer that has the token and sends what no proxy would is given up.
  [[noreturn]] void refuse(const Frame& frame, const std::string& why) {
    Link& link = links_[frame.source];
    if (link.failure.empty()) link.failure = "a frame of it is invalid: " + why;
    has_failed_ = true;
    throw Refused(why);
  }

  uint8_t* place(const Frame& frame) {
    Link& link = links_[frame.source];
    if (frame.number <= link.received || link.early.count(frame.number)) return nullptr;
    if (frame.number > link.received + 2 * kWindow) {
      refuse(frame, "it is put " + std::to_string(frame.number) + ", and " + std::to_string(link.received) + " have come");
    }
    auto found = regions_.find(frame.region);
    if (frame.region >= kLocalRegions || found == regions_.end()) {
      if (frame.region < known_) return nullptr;
      refuse(frame, "there is no region " + std::to_string(frame.region));
    }
    std::string problem = find_outside(found->second, frame);
    if (!problem.empty()) refuse(frame, problem);
    return found->second.whole + found->second.pad_bytes + frame.offset;
  }

  void arrived(const Frame& frame) {
    Link& link = links_[frame.source];
    if (frame.received > link.sent) {
      refuse(frame, "it acknowledges put " + std::to_string(frame.received) + " of " + std::to_string(link.sent));
    }
    if (forget_received(link, frame.received)) link.since = now();
    if (frame.kind == kBye) fail(frame.source, "it has closed the group");
    if (frame.kind != kPut || frame.number <= link.received) return;
    auto receive = [&](const Early& put) {
      ++link.received;
      if (link.owed_since == 0.0) link.owed_since = now();
      auto found = regions_.find(put.region);
      if (found != regions_.end()) count(found->second.whole, found->second, frame.source, put.signal);
    };
    if (frame.number == link.received + 1) {  // as most: over one connection all come in order
      receive({frame.region, frame.signal});
    } else {
      link.early[frame.number] = {frame.region, frame.signal};
    }
    while (!link.early.empty() && link.early.begin()->first == link.received + 1) {
      Early ready = link.early.begin()->second;
      link.early.erase(link.early.begin());
      receive(ready);
    }
  }

  const int rank_, world_;
  const double limit_;
  const bool sends_apart_;
  uint8_t token_[16];
  std::string host_, broken_;
  int listener_ = -1, wakes_ = -1, nudges_ = -1;
  std::mutex mutex_;
  std::thread thread_, sender_;
  std::condition_variable has_backlog_;
  bool is_closing_ = false, drops_ = false;  // drops_: payloads of more than a word, for a bench
  double checked_ = 0.0;
  double accepts_from_ = 0.0;  // when connections are accepted again
  std::atomic<uint64_t> calls_[kCalls] = {}, asked_ = 0;  // asked_: to wake
  std::atomic<bool> is_asleep_ = false, has_failed_ = false, has_polled_ = false;  // has_polled_: kernels write to a FIFO
  int drivers_ = 0;           // callers in `pause`
  double driven_ = 0.0;       // when the last one left it
  double parked_until_ = 0.0; // the thread leaves the connections to callers; 0: it does not
  double worked_ = 0.0;
  uint64_t seen_ = 0, swept_ = 0;         // seen_: of asked_; swept_: connections freed
  uint64_t counted_ = 0, reported_ = 0;   // signals and failures; what `pause` has told of them
  std::vector<Link> links_;
  std::map<uint64_t, Region> regions_;
  uint64_t known_ = 0;
  std::vector<Fifo> fifos_;
  Fifo posted_{};  // of `put`
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<int, std::pair<std::string, int>> addresses_;
  std::map<int, std::pair<double, double>> retries_;
};

}  // namespace

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT void* proxy_open(int rank, int world, const uint8_t* token, double limit, int sends_apart, const char* host,
                        int* port) {
  auto* proxy = new Proxy(rank, world, token, limit, sends_apart != 0);
  *port = proxy->listen_on(host);
  return proxy;
}
EXPORT void proxy_add_peer(void* proxy, int peer, const char* host, int port) {
  static_cast<Proxy*>(proxy)->add_peer(peer, host, port);
}
EXPORT void proxy_start(void* proxy) { static_cast<Proxy*>(proxy)->start(); }
EXPORT void proxy_add_region(void* proxy, uint64_t number, uint64_t whole, uint64_t pad_bytes, uint64_t size,
                             uint64_t signals, const uint64_t* near, int world) {
  Region region{reinterpret_cast<uint8_t*>(whole), pad_bytes, size, signals, {}};
  for (int rank = 0; rank < world; ++rank) region.near.push_back(reinterpret_cast<uint8_t*>(near[rank]));
  static_cast<Proxy*>(proxy)->add_region(number, std::move(region));
}
EXPORT void proxy_remove_region(void* proxy, uint64_t number, double seconds) {
  static_cast<Proxy*>(proxy)->remove_region(number, seconds);
}
EXPORT void proxy_add_fifo(void* proxy, uint64_t words, uint64_t capacity, uint64_t tail, int is_polled) {
  static_cast<Proxy*>(proxy)->add_fifo(
      {reinterpret_cast<uint64_t*>(words), capacity, reinterpret_cast<uint64_t*>(tail), is_polled != 0});
}
EXPORT void proxy_remove_fifo(void* proxy, uint64_t words) {
  static_cast<Proxy*>(proxy)->remove_fifo(reinterpret_cast<uint64_t*>(words));
}
EXPORT int proxy_put(void* proxy, uint64_t ticket, uint64_t peer, uint64_t source_region, uint64_t source,
                     uint64_t region, uint64_t offset, uint64_t size, uint64_t signal) {
  return static_cast<Proxy*>(proxy)->put(ticket, peer, source_region, source, region, offset, size, signal);
}
EXPORT int proxy_await(void* proxy, uint64_t counter, uint32_t target, double seconds) {
  return static_cast<Proxy*>(proxy)->await(reinterpret_cast<uint32_t*>(counter), target, seconds);
}
EXPORT int proxy_wake(void* proxy) { return static_cast<Proxy*>(proxy)->wake(); }
EXPORT void proxy_pause(void* proxy, double seconds) { static_cast<Proxy*>(proxy)->pause(seconds); }
EXPORT int proxy_failure(void* proxy, int peer, char* text, int room) {
  std::string found = static_cast<Proxy*>(proxy)->failure(peer);
  int length = std::min<int>(found.size(), room);
  memcpy(text, found.data(), length);
  return length;
}
EXPORT void proxy_count_calls(void* proxy, uint64_t* counts) { static_cast<Proxy*>(proxy)->count_calls(counts); }
EXPORT void proxy_drop_payloads(void* proxy, int drops) { static_cast<Proxy*>(proxy)->drop_payloads(drops != 0); }
EXPORT void proxy_break_connection(void* proxy, int peer) { static_cast<Proxy*>(proxy)->break_connection(peer); }
EXPORT void proxy_close(void* proxy, double seconds) { static_cast<Proxy*>(proxy)->close(seconds); }
EXPORT void proxy_free(void* proxy) { delete static_cast<Proxy*>(proxy); }
}
