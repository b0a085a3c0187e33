// Which tokens of two rollouts differ: the shortest edit script of E. W. Myers, "An O(ND) Difference Algorithm and Its
// Variations" (1986), whose memory is bounded by giving up after a number of differences.
"use strict";
const MAX_DIFFERENCES = 2000;

// Returns two arrays of booleans: whether each token of *a*, and each one of *b*, is missing from the other.
function tokenDiff(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const left = a.slice(start, a.length - end), right = b.slice(start, b.length - end);
  const onlyA = new Array(a.length).fill(false), onlyB = new Array(b.length).fill(false);
  for (let i = 0; i < left.length; i++) onlyA[start + i] = true;
  for (let j = 0; j < right.length; j++) onlyB[start + j] = true;
  for (const [i, j] of commonTokens(left, right)) onlyA[start + i] = onlyB[start + j] = false;
  return [onlyA, onlyB];
}

// Returns pairs of indices of the tokens that a shortest edit script keeps; none if there are too many differences.
function commonTokens(a, b) {
  const most = Math.min(a.length + b.length, MAX_DIFFERENCES);
  const furthest = new Map([[1, 0]]);
  const trace = [];
  for (let edits = 0; edits <= most; edits++) {
    trace.push(new Map(furthest));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
      let x = down ? furthest.get(k + 1) : furthest.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      furthest.set(k, x);
      if (x >= a.length && x - k >= b.length) return backtrack(trace, a, b);
    }
  }
  return [];
}

function backtrack(trace, a, b) {
  const pairs = [];
  let x = a.length, y = b.length;
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const furthest = trace[edits], k = x - y;
    const down = k === -edits || (k !== edits && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
    const previousK = down ? k + 1 : k - 1;
    const previousX = edits ? furthest.get(previousK) : 0, previousY = edits ? previousX - previousK : 0;
    while (x > previousX && y > previousY) pairs.push([--x, --y]);
    x = previousX;
    y = previousY;
  }
  return pairs;
}
