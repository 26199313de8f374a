// Building programs from Python descriptions (cold), and running one for a call (hot).
#pragma once

#include "pack/executable.h"
#include "python.h"

namespace opgraph {

class Program;

// Registers Module, Function, Program and the driver queries; called by the module's init.
void program_init(PyObject* module);

// The program behind a Python object, or null when it is none. Borrowed.
const Program* program_of(PyObject* object);

// Issues the steps of `program` for a prepared call; false with a Python exception set.
bool run_program(const Program& program, Call& call);

}  // namespace opgraph
