// SPDX-License-Identifier: Apache-2.0
//
// The steps of a tokenizer.json around its model: normalizer, pre_tokenizer, post_processor, decoder.
#pragma once

#include "models/text/json_reader.h"
#include "models/text/tokenizer_parts.h"

namespace metrale::text {

// Each reads its member of the document. Errors: bad_format, unsupported (a step that metrale has no code for).
Result<> read_normalizer(const JsonNode& root, TokenizerParts& parts);
Result<> read_pre_tokenizer(const JsonNode& root, TokenizerParts& parts);
/// Needs `parts.entries`: it may name the token that starts a text.
Result<> read_post_processor(const JsonNode& root, TokenizerParts& parts);
Result<> check_decoder(const JsonNode& root);

}  // namespace metrale::text
