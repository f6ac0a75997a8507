// SPDX-License-Identifier: Apache-2.0
//
// Result<T> and Error: how every call in metrale fails. A failure is a value, never an exception and never an abort, and it owns
// the text a person needs: what was asked, what was there, what to change, and the line that asked. `Result` is a class rather than
// an alias so that a dropped failure is a compiler warning; `Error` is one owning pointer so that the ok path stays two words wide.
// Objects of these types belong to one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <type_traits>
#include <utility>
#include <vector>

namespace metrale {

/// The kind of failure. The comment says what the caller can do next.
enum class Errc : std::uint8_t {
  invalid_argument = 1,  ///< The call is wrong, or wrong in this state (released, ended); correct it.
  out_of_range,          ///< A copy, id or index leaves its allocation or table; nothing was enqueued.
  out_of_memory,         ///< Pools were trimmed and the retry failed; free something, ask for less, or raise the budget.
  not_found,             ///< No such module, kernel, symbol, file or tensor; the message lists what was tried.
  unsupported,           ///< This backend cannot; `capabilities()` said so beforehand. Take another path.
  capture_unsafe,        ///< Would break an open capture. Nothing was done and the capture goes on; call again after it.
  in_use,                ///< A live graph or an open capture names the memory; end or destroy that first.
  device_lost,           ///< The device is gone for this process. Only releasing still works; restart the process.
  timeout,               ///< The deadline passed; the work goes on and may be waited for again.
  busy,                  ///< Held by someone else at the moment; try again later.
  io,                    ///< The operating system refused; the message has its words.
  bad_format,            ///< A file is truncated, lies or is hostile; nothing was kept of it.
  internal,              ///< A fault in metrale; please report it with the message.
};

/// The enumerator's name, e.g. "out_of_memory".
std::string_view to_string(Errc code) noexcept;

/// One failure. Owns its text; a copy copies it. The one of `no_memory` owns nothing and keeps no site, text or note it is given.
class [[nodiscard]] Error {
 public:
  Error(Errc code, std::string message, std::source_location site = std::source_location::current());

  /// out_of_memory for where not even a message can be made: takes no memory itself.
  static Error no_memory() noexcept;

  Error(Error&&) noexcept = default;
  Error& operator=(Error&&) noexcept = default;
  Error(const Error& other);
  Error& operator=(const Error& other) { return *this = Error(other); }
  ~Error() = default;

  Errc code() const noexcept { return body_->code; }
  const std::string& message() const noexcept { return body_->message; }
  /// The caller whose request failed.
  const std::source_location& site() const noexcept { return body_->site; }
  /// The driver's or library's own number; 0 when the failure is ours.
  std::int64_t native_code() const noexcept { return body_->native_code; }
  /// The driver's or library's own words; empty when the failure is ours.
  const std::string& native_text() const noexcept { return body_->native_text; }
  /// Context added on the way up, innermost first.
  const std::vector<std::string>& notes() const noexcept { return body_->notes; }

  /// Attaches the foreign status this failure was translated from.
  Error with_native(std::int64_t code, std::string text) &&;
  /// Replaces the call site: the face reports its caller rather than the backend's own line.
  Error with_site(std::source_location site) &&;
  /// Adds a line of context, e.g. "while loading layer 7".
  Error with_note(std::string note) &&;

  /// One line: "out_of_memory: <message> [driver 2: <text>] (file.cpp:12); <note>; <note>".
  std::string to_string() const;

 private:
  struct Body {
    Errc code;
    std::int64_t native_code = 0;
    std::string native_text;
    std::string message;
    std::source_location site;
    std::vector<std::string> notes;
  };
  // Deletes a body unless it is the one that all errors of `no_memory` share.
  struct Drop {
    void operator()(Body* body) const noexcept;
  };
  using Owner = std::unique_ptr<Body, Drop>;

  explicit Error(Owner body) noexcept : body_(std::move(body)) {}
  static Body& shared_body() noexcept;
  bool is_shared() const noexcept;

  Owner body_;
};
static_assert(sizeof(Error) == sizeof(void*), "Error must stay one pointer: it is part of every Result");

/// A value or an Error. Members are those of std::expected. An `Error` converts to any `Result<T>`, so failures are returned as
/// `return Error(Errc::invalid_argument, "…", site);`.
template <class T = void>
class [[nodiscard]] Result : public tl::expected<T, Error> {
  using Base = tl::expected<T, Error>;

 public:
  using Base::Base;
  Result() = default;
  Result(Error error) : Base(tl::unexpect, std::move(error)) {}  // NOLINT(google-explicit-constructor)

  // tl::expected 1.0 leaves out value() for void; as elsewhere it throws when there is an error.
  using Base::value;
  void value() const
    requires(std::is_void_v<T>)
  {
    if (!this->has_value()) throw tl::bad_expected_access<Error>(this->error());
  }
};
static_assert(sizeof(Result<>) == 2 * sizeof(void*));

namespace detail {
template <class T>
T take(Result<T>&& result) {
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}
}  // namespace detail

/// Evaluates a Result expression; on failure returns its Error from the enclosing function, otherwise yields the value.
/// The one macro in metrale that returns: `DevicePtr p = METRALE_TRY(backend.alloc(bytes));`
#define METRALE_TRY(...)                                              \
  __extension__({                                                     \
    auto metrale_try_result = (__VA_ARGS__);                          \
    if (!metrale_try_result) [[unlikely]]                             \
      return ::metrale::Error(std::move(metrale_try_result).error()); \
    ::metrale::detail::take(std::move(metrale_try_result));           \
  })

}  // namespace metrale
