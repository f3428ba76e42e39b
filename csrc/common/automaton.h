// Automata over tokens: int32 words that all rows share. A row names where its own one begins.
// At word 0 is the vocabulary: how many tokens, where their bytes begin, and from word 4 on a word
// for each token. An automaton is a header, the classes of the 256 bytes (64 words), a word for
// each state, its transitions and its masks; photon_ext/layout.py has them, photon_ext/sampling/
// token_automaton.py makes them.
#pragma once
#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "segment.h"

namespace photon {

enum VocabularyWord : int32_t {
  kVocabularyTokens = 0,
  kVocabularyBytes = 1,
  kVocabularyHeader = 4
};
enum AutomatonWord : int32_t {
  kAutomatonStates = 0,
  kAutomatonClasses = 1,
  kAutomatonMasks = 2,
  kAutomatonMaskWords = 3,
  kAutomatonMasksBegin = 4,  // from the automaton's begin
  kAutomatonSize = 5,        // words in all
  kAutomatonHeader = 8
};
enum AutomatonStateBit : int32_t { kStateAccepting = 1, kStateComplete = 2, kStateMaskShift = 2 };

constexpr int32_t kNoState = -1;
constexpr int32_t kEndToken = -1;  // a token's word: it ends answers
constexpr int32_t kClassWords = 64;

// A row's automaton at its state. Every number from the device is checked: garbage makes it none.
struct Automaton {
  const int32_t* words;  // its begin; null: the row has none, or it is none
  int32_t state;
  bool is_error;  // the row names one, and it is none

  PHOTON_HOST_DEVICE int32_t states() const { return words[kAutomatonStates]; }
  PHOTON_HOST_DEVICE int32_t classes() const { return words[kAutomatonClasses]; }
  PHOTON_HOST_DEVICE int32_t state_word(int32_t of) const {
    return words[kAutomatonHeader + kClassWords + of];
  }
  PHOTON_HOST_DEVICE int32_t class_of(uint32_t byte) const {
    return reinterpret_cast<const uint8_t*>(words + kAutomatonHeader)[byte];
  }
  // Where a byte of a class leads from a state; kNoState: nowhere, as does a class that is none.
  PHOTON_HOST_DEVICE int32_t after(int32_t from, int32_t byte_class) const {
    if (byte_class >= classes()) return kNoState;
    const int64_t place = int64_t{from} * classes() + byte_class;
    const int32_t to = words[kAutomatonHeader + kClassWords + states() + place];
    return to >= 0 && to < states() ? to : kNoState;
  }
  // [mask_words]
  PHOTON_HOST_DEVICE const int32_t* mask() const {
    const int64_t index = state_word(state) >> kStateMaskShift;
    return words + words[kAutomatonMasksBegin] + index * words[kAutomatonMaskWords];
  }
};

// Of a row that is in the tables; `mask_words`: those of one mask at least.
PHOTON_HOST_DEVICE inline Automaton load_automaton(const AutomataWords& all,
                                                   const int32_t* row_state, int32_t row,
                                                   int64_t mask_words) {
  const int32_t* const columns = row_words(row_state, row);
  const int64_t begin = columns[kRowAutomaton];
  if (begin == 0) return {nullptr, 0, false};
  const Automaton none{nullptr, 0, true};
  if (begin < 0 || begin + kAutomatonHeader > all.size) return none;
  const int32_t* const words = all.words + begin;
  const int64_t states = words[kAutomatonStates], classes = words[kAutomatonClasses];
  const int64_t masks = words[kAutomatonMasks], width = words[kAutomatonMaskWords];
  const int64_t size = words[kAutomatonSize], masks_begin = words[kAutomatonMasksBegin];
  const bool is_whole = states > 0 && classes > 0 && classes <= 256 && masks > 0 &&
                        width >= mask_words && size <= all.size - begin &&
                        kAutomatonHeader + kClassWords + states * (1 + classes) <= masks_begin &&
                        masks_begin + masks * width <= size;
  const int32_t state = columns[kRowAutomatonState];
  if (!is_whole || state < 0 || state >= states) return none;
  const Automaton found{words, state, false};
  const int32_t mask = found.state_word(state) >> kStateMaskShift;
  return mask >= 0 && mask < masks ? found : none;
}

// A token's bytes.
struct TokenText {
  const uint8_t* bytes;
  int32_t length;  // 0: it is never allowed, or ends answers
  bool ends;
};

PHOTON_HOST_DEVICE inline TokenText token_text(const AutomataWords& all, int32_t token) {
  const TokenText none{nullptr, 0, false};
  if (all.size < kVocabularyHeader) return none;
  const int64_t tokens = all.words[kVocabularyTokens], begin = all.words[kVocabularyBytes];
  if (token < 0 || token >= tokens || kVocabularyHeader + tokens > all.size || begin < 0)
    return none;
  const int32_t word = all.words[kVocabularyHeader + token];
  if (word == kEndToken) return {nullptr, 0, true};
  const int64_t first = word >> 8, length = word & 255;
  if (first < 0 || begin * 4 + first + length > all.size * 4) return none;
  return {reinterpret_cast<const uint8_t*>(all.words + begin) + first, static_cast<int32_t>(length),
          false};
}

}  // namespace photon
