# SPDX-License-Identifier: Apache-2.0
# A CUDA source is compiled once for each state of what it includes, however many builds ask.
file(REMOVE_RECURSE ${work})
file(WRITE ${work}/include/width.cuh "constexpr int kWidth = 4;\n")
file(WRITE ${work}/unused.cuh "one\n")
file(WRITE ${work}/fill.cu [[
#include "width.cuh"
extern "C" __device__ const unsigned fill_n_tile = kWidth;
extern "C" __global__ void fill(int* p) { p[threadIdx.x] = kWidth; }
]])
# Counts the compilations and leaves the rest to nvcc.
file(WRITE ${work}/nvcc "#!/bin/sh\ncase \"$*\" in *-ptx*) echo x >>'${work}/compiled' ;; esac\nexec '${nvcc}' \"$@\"\n")
file(CHMOD ${work}/nvcc PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)

# compile(count what build): asks for it once more; `count` compilations must have been made in all.
function(compile count what build)
  execute_process(COMMAND ${CMAKE_COMMAND} -D source=${work}/fill.cu -D output=${work}/${build} -D arch=90a -D nvcc=${work}/nvcc
      -D root=${work} -D includes=${work}/include -D cache=${work}/cache -D strict=ON -P ${root}/cmake/metrale_nvcc.cmake
    COMMAND_ERROR_IS_FATAL ANY)
  file(STRINGS ${work}/compiled lines)
  list(LENGTH lines made)
  if(NOT made EQUAL count)
    message(SEND_ERROR "${what}: ${made} compilations so far, not ${count}")
  endif()
  foreach(kind IN ITEMS cubin ptx txt d)
    if(NOT EXISTS ${work}/${build}.${kind})
      message(SEND_ERROR "${what}: no .${kind}")
    endif()
  endforeach()
endfunction()

# width(number): what the code of build a has.
function(width number)
  file(READ ${work}/a.ptx text)
  if(NOT text MATCHES "\\.visible \\.global [^\n]*fill_n_tile = ${number};")
    message(SEND_ERROR "the code is not that of a width of ${number}, or its global is not visible:\n${text}")
  endif()
  if(text MATCHES "${work}")
    message(SEND_ERROR "a path of this machine is in the code:\n${text}")
  endif()
endfunction()

compile(1 "the first build" a)
width(4)
compile(1 "the same again" a)
compile(1 "another build" b)
file(WRITE ${work}/unused.cuh "two\n")
compile(1 "a file that it does not include" a)
file(WRITE ${work}/include/width.cuh "constexpr int kWidth = 8;\n")
compile(2 "a changed header" a)
width(8)
file(WRITE ${work}/include/width.cuh "constexpr int kWidth = 4;\n")
compile(2 "the header as it was" a)
width(4)
file(APPEND ${work}/fill.cu "// more\n")
compile(3 "a changed source" a)
file(READ ${work}/a.d rule)
if(NOT rule MATCHES "width\\.cuh")
  message(SEND_ERROR "the rule for ninja does not name the header: ${rule}")
endif()
file(GLOB left ${work}/cache/work.*)
if(left)
  message(SEND_ERROR "left behind: ${left}")
endif()
file(REMOVE_RECURSE ${work})
