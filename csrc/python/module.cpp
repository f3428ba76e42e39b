// photon_ext._C: the device layer as Python classes, and plans.cpp. No logic here: names, GIL and
// object lifetimes only.
//
// The GIL is released where a call may block (synchronize, wait) or compute (the inline backend),
// and before C++ destructors, which drain. It is kept in short enqueueing calls: giving it up there
// would let another thread hold the step back for a whole switch interval.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/decode_slot.h"
#include "device/device.h"
#include "device/host_backend.h"
#include "device/host_claim.h"
#include "device/host_trace.h"
#include "device/text.h"
#include "python/plans.h"

namespace py = pybind11;
using namespace photon::device;

namespace {

// Keeps a Python object alive from C++; it is let go with the GIL held, from whatever thread, and
// leaked once the interpreter is gone.
std::shared_ptr<void> keeper(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* kept) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(kept));
  });
}

struct ReleaseIfInline {
  explicit ReleaseIfInline(const Stream& stream) {
    if (stream.backend() == Backend::kInline) released.emplace();
  }
  std::optional<py::gil_scoped_release> released;
};

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

size_t byte_count(const char* call, int64_t bytes) {
  if (bytes < 0)
    throw py::value_error(text(call, ": nbytes is ", bytes, ", expected zero or more"));
  return static_cast<size_t>(bytes);
}

void copy(Stream& stream, uintptr_t dst, uintptr_t src, int64_t bytes) {
  const size_t count = byte_count("Stream.copy", bytes);
  if (count == 0) return;
  stream.check_copy(pointer(dst), pointer(src));
  stream.copy(pointer(dst), pointer(src), count);
}

void enqueue(const Stream& stream, uintptr_t kernel, const py::bytes& params) {
  const photon::HostQueue* queue = stream.queue();
  if (queue == nullptr)
    throw py::value_error(
        "Stream.enqueue: C functions run on host and inline streams; on cuda launch a kernel");
  const std::string_view bytes = params;
  const ReleaseIfInline release(stream);
  queue->push(queue->context, reinterpret_cast<photon::HostKernel>(kernel), bytes.data(),
              bytes.size(), nullptr);
}

void launch_graph(Stream& stream, const std::shared_ptr<Graph>& graph) {
  const ReleaseIfInline release(stream);
  stream.launch(graph);
}

// What lasts as long as the process: not even its end destroys them.
std::vector<std::shared_ptr<Stream>>& lasting_streams() {
  static auto* const streams = new std::vector<std::shared_ptr<Stream>>;
  return *streams;
}

void bind_streams(py::module_& m) {
  using released = py::call_guard<py::gil_scoped_release>;
  py::class_<Event, std::shared_ptr<Event>>(m, "Event", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const std::string& backend, bool timing, bool blocking, int device) {
             return create_event(parse_backend(backend), timing, blocking, device);
           }),
           py::arg("backend"), py::arg("timing") = false, py::arg("blocking") = true,
           py::arg("device") = 0)
      .def_property_readonly("backend",
                             [](const Event& event) { return backend_name(event.backend()); })
      .def("query", &Event::query)
      .def("synchronize", &Event::synchronize, released())
      .def("elapsed_ms", &Event::elapsed_ms, py::arg("since"));

  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph", py::release_gil_before_calling_cpp_dtor())
      .def_static("from_cuda", &graph_from_cuda, py::arg("raw"), py::arg("device") = 0)
      .def_property_readonly("backend",
                             [](const Graph& graph) { return backend_name(graph.backend()); })
      .def_property_readonly("nodes", &Graph::nodes)
      .def(
          "keep_alive",
          [](Graph& graph, py::object object) { graph.keep_alive(keeper(std::move(object))); },
          py::arg("object"));

  py::class_<Claim>(m, "Claim", py::release_gil_before_calling_cpp_dtor())
      .def("__enter__",
           [](Claim& claim) {
             claim.enter();
             return claim.stream();
           })
      .def("__exit__", [](Claim& claim, const py::args&) { claim.exit(); });

  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream",
                                              py::release_gil_before_calling_cpp_dtor())
      .def_static(
          "create",
          [](const std::string& backend, int device) {
            return create_stream(parse_backend(backend), device);
          },
          py::arg("backend"), py::arg("device") = 0)
      .def_static("wrap", &wrap_stream, py::arg("handle"), py::arg("device") = 0)
      .def_property_readonly("backend",
                             [](const Stream& stream) { return backend_name(stream.backend()); })
      .def_property_readonly("handle", &Stream::handle)
      .def_property_readonly("device", &Stream::device)
      .def_property_readonly("id", &Stream::id)
      .def("record", &Stream::record, py::arg("event").none(false))
      .def("wait", &Stream::wait, py::arg("event").none(false))
      .def("synchronize", &Stream::synchronize, released())
      .def("query", &Stream::query)
      .def("copy", &copy, py::arg("dst"), py::arg("src"), py::arg("nbytes"))
      .def("enqueue", &enqueue, py::arg("kernel"), py::arg("params"))
      .def("begin_capture", &Stream::begin_capture)
      .def("end_capture", &Stream::end_capture)
      .def("launch", &launch_graph, py::arg("graph").none(false))
      .def("keep_forever",
           [](std::shared_ptr<Stream> stream) { lasting_streams().push_back(std::move(stream)); })
      .def("claim", [](const std::shared_ptr<Stream>& stream) { return Claim(stream); });
}

void bind_buffers(py::module_& m) {
  py::class_<PinnedBuffer, std::shared_ptr<PinnedBuffer>>(m, "PinnedBuffer", py::buffer_protocol(),
                                                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](int64_t bytes, const std::string& backend) {
             return create_pinned(parse_backend(backend), byte_count("PinnedBuffer", bytes));
           }),
           py::arg("nbytes"), py::arg("backend"))
      .def_property_readonly(
          "backend", [](const PinnedBuffer& buffer) { return backend_name(buffer.backend()); })
      .def_property_readonly(
          "ptr",
          [](const PinnedBuffer& buffer) { return reinterpret_cast<uintptr_t>(buffer.data()); })
      .def_property_readonly("nbytes", &PinnedBuffer::bytes)
      .def_buffer([](PinnedBuffer& buffer) {
        return py::buffer_info(static_cast<int32_t*>(buffer.data()),
                               static_cast<py::ssize_t>(buffer.bytes() / sizeof(int32_t)));
      });
}

void bind_slot(py::module_& m) {
  using released = py::call_guard<py::gil_scoped_release>;
  py::class_<DecodeSlot>(m, "DecodeSlot", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](std::shared_ptr<Stream> compute, std::shared_ptr<Stream> in_copy,
                       std::shared_ptr<Stream> out_copy, std::shared_ptr<PinnedBuffer> input,
                       uintptr_t input_ptr, std::shared_ptr<PinnedBuffer> output,
                       uintptr_t output_ptr, std::shared_ptr<PinnedBuffer> mask, uintptr_t mask_ptr,
                       bool timing, bool blocking) {
             return std::make_unique<DecodeSlot>(
                 DecodeSlotConfig{std::move(compute), std::move(in_copy), std::move(out_copy),
                                  Transfer{std::move(input), pointer(input_ptr)},
                                  Transfer{std::move(output), pointer(output_ptr)},
                                  Transfer{std::move(mask), pointer(mask_ptr)}, timing, blocking});
           }),
           py::arg("compute"), py::arg("in_copy"), py::arg("out_copy"), py::arg("input"),
           py::arg("input_ptr"), py::arg("output"), py::arg("output_ptr"),
           py::arg("mask") = nullptr, py::arg("mask_ptr") = 0, py::arg("timing") = false,
           py::arg("blocking") = true)
      .def(
          "launch",
          [](DecodeSlot& slot, const std::shared_ptr<Graph>& graph, int64_t input_words,
             bool finish, int64_t output_words) {
            const ReleaseIfInline release(*slot.config().compute);
            slot.launch(graph, input_words, finish, output_words);
          },
          py::arg("graph"), py::arg("input_words"), py::arg("finish"), py::arg("output_words"))
      .def("begin", &DecodeSlot::begin, py::arg("input_words"))
      .def("end", &DecodeSlot::end, py::arg("output_words"), py::arg("finish") = true)
      .def(
          "finalize",
          [](DecodeSlot& slot, const std::shared_ptr<Graph>& graph, int64_t mask_words,
             int64_t output_words) {
            const ReleaseIfInline release(*slot.config().compute);
            slot.finalize(graph, mask_words, output_words);
          },
          py::arg("graph"), py::arg("mask_words"), py::arg("output_words"))
      .def("begin_finalize", &DecodeSlot::begin_finalize, py::arg("mask_words"))
      .def("wait", &DecodeSlot::wait, released())
      .def("done", &DecodeSlot::done)
      .def("span", &DecodeSlot::span);
}

const char* work_name(Work work) {
  switch (work) {
    case Work::kKernel:
      return "kernel";
    case Work::kCopy:
      return "copy";
    case Work::kReplay:
      return "graph";
    case Work::kWait:
      return "wait";
  }
  return "unknown";
}

// ([(work, name or None, stream id, begin ns, end ns, bytes, processor ns)], dropped records)
py::tuple host_trace_as_python(const WorkTrace& trace) {
  py::list records;
  for (const WorkRecord& record : trace.records) {
    const py::object name = record.name == nullptr ? py::object(py::none()) : py::str(record.name);
    records.append(py::make_tuple(work_name(record.work), name, record.stream, record.begin_ns,
                                  record.end_ns, record.bytes, record.cpu_ns));
  }
  return py::make_tuple(records, trace.dropped);
}

size_t record_count(int64_t capacity) {
  if (capacity < 1)
    throw py::value_error(
        text("start_host_trace: capacity is ", capacity, ", expected one record or more"));
  return static_cast<size_t>(capacity);
}

void bind_trace(py::module_& m) {
  m.def(
      "start_host_trace", [](int64_t capacity) { start_host_trace(record_count(capacity)); },
      py::arg("capacity"));
  m.def("drain_host_streams", &drain_host_streams, py::call_guard<py::gil_scoped_release>());
  m.def("stop_host_trace", [] { return host_trace_as_python(stop_host_trace()); });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "Streams, events, pinned buffers, graphs and decode slots of photon_ext (cuda, host and "
      "inline backends), and which kernels run on a GPU.";
  bind_streams(m);
  bind_buffers(m);
  bind_slot(m);
  bind_trace(m);
  bind_plans(m);
  m.attr("cuda_compiled") = cuda_compiled();
  m.def("cuda_device_count", &cuda_device_count);
  m.def(
      "bind_ops", [](uintptr_t address) { bind_ops(reinterpret_cast<SetHostQueue>(address)); },
      py::arg("set_host_queue_address"));
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&drain_host_streams, py::call_guard<py::gil_scoped_release>()));
}
