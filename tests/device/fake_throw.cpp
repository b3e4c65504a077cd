// The exceptions of the fake libsycl.
#include <exception>
#include <new>
#include <string>

namespace sycl {
inline namespace _V1 {
class exception : public virtual std::exception {
  std::string text;

public:
  explicit exception(const char *of) : text(of) {}
  const char *what() const noexcept override;
};
const char *exception::what() const noexcept { return text.c_str(); }
} // namespace _V1
} // namespace sycl

extern "C" [[noreturn]] void fake_throw(const char *text) {
  if (text == nullptr) throw std::bad_alloc();
  throw sycl::exception(text);
}
