// Small integer expressions over the live extents of a call: grid sizes, element counts, strides as kernel arguments.
// Postfix, evaluated on a fixed stack; validated when the program is built, so evaluation cannot fail.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pack/layout.h"

namespace opgraph {

enum class ExprOp : uint8_t { constant, dim, stride, add, sub, mul, floor_div, ceil_div, min, max };

struct ExprTerm {
  ExprOp op;
  uint8_t axis = 0;      // dim, stride
  int32_t operand = 0;   // dim, stride
  int64_t value = 0;     // constant
};

using Expr = std::vector<ExprTerm>;

constexpr int kExprDepth = 8;

// Empty when `e` leaves exactly one value, stays within the stack and names axes that exist; else the reason.
// `ranks[i]` is the rank of operand i.
inline std::string check_expression(const Expr& e, const std::vector<int>& ranks) {
  int depth = 0;
  for (const ExprTerm& t : e) {
    if (t.op == ExprOp::constant) {
      depth++;
    } else if (t.op == ExprOp::dim || t.op == ExprOp::stride) {
      if (t.operand < 0 || t.operand >= static_cast<int>(ranks.size()) || t.axis >= ranks[t.operand])
        return "an expression names an axis that does not exist";
      depth++;
    } else if (--depth < 1) {
      return "an expression takes more values than it has";
    }
    if (depth > kExprDepth) return "an expression is too deep";
  }
  return depth == 1 ? "" : "an expression does not leave one value";
}

// `layouts[i]`: live layout of operand i. Division by zero yields 0 (an extent of 0: nothing to do).
inline int64_t evaluate(const Expr& e, const Layout* const* layouts) {
  int64_t stack[kExprDepth + 1];
  int n = 0;
  for (const ExprTerm& t : e) {
    switch (t.op) {
      case ExprOp::constant: stack[n++] = t.value; continue;
      case ExprOp::dim: stack[n++] = layouts[t.operand]->dims[t.axis]; continue;
      case ExprOp::stride: stack[n++] = layouts[t.operand]->strides[t.axis]; continue;
      default: break;
    }
    const int64_t b = stack[--n];
    int64_t& a = stack[n - 1];
    switch (t.op) {
      case ExprOp::add: a += b; break;
      case ExprOp::sub: a -= b; break;
      case ExprOp::mul: a *= b; break;
      case ExprOp::floor_div: a = b ? a / b : 0; break;
      case ExprOp::ceil_div: a = b ? (a + b - 1) / b : 0; break;
      case ExprOp::min: a = a < b ? a : b; break;
      case ExprOp::max: a = a > b ? a : b; break;
      default: break;
    }
  }
  return stack[0];
}

}  // namespace opgraph
