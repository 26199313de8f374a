// A Python tracer that compiles frames as they run (torch.compile) also sees the frames this library runs inside a call:
// the CPU engine's, and the cold paths that format, plan and read. They are no part of the user's program, and tracing
// them fails in ways the user cannot act on. So the tracer is paused for as long as a native entry point runs.
#pragma once

#include "python.h"

namespace opgraph {

class TracerPause {
 public:
  TracerPause() {
    // PEP 523: a tracer replaces the interpreter's frame evaluation. Without one this is two loads and a compare.
    if (OG_UNLIKELY(_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault)) pause();
  }
  ~TracerPause() {
    if (OG_UNLIKELY(callback_ != nullptr)) resume();
  }
  TracerPause(const TracerPause&) = delete;
  TracerPause& operator=(const TracerPause&) = delete;

 private:
  void pause();
  void resume();
  PyObject* callback_ = nullptr;  // what this thread's tracer was set to; owned while paused
  PyObject* set_ = nullptr;       // the tracer's setter; owned while paused
};

}  // namespace opgraph
