# SPDX-License-Identifier: Apache-2.0
# Every option of the build, in one place.
option(METRALE_BUILD_TOOL "Build the metgpu command" ${PROJECT_IS_TOP_LEVEL})
option(METRALE_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(METRALE_BUILD_BENCHMARKS "Build the benchmarks" OFF)
option(METRALE_BUILD_FUZZERS "Build the libFuzzer targets (clang only)" OFF)
option(METRALE_INSTALL "Make the install rules and the CMake package" ${PROJECT_IS_TOP_LEVEL})
option(METRALE_WARNINGS_AS_ERRORS "Treat warnings in metrale's own code as errors" OFF)
option(METRALE_STATIC_THIRD_PARTY "Link third-party libraries statically, for a binary that runs on other machines" OFF)
set(METRALE_SANITIZE "" CACHE STRING "Sanitizers for everything, e.g. address,undefined or thread")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Each public header is compiled alone: `all_verify_interface_header_sets` does it, and so does `all` where tests are built.
set(CMAKE_VERIFY_INTERFACE_HEADER_SETS ${METRALE_BUILD_TESTS})

if(METRALE_SANITIZE)
  add_compile_options(-fsanitize=${METRALE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${METRALE_SANITIZE})
endif()

if(METRALE_STATIC_THIRD_PARTY)
  set(CMAKE_FIND_LIBRARY_SUFFIXES .a .so)
  add_link_options(-static-libstdc++ -static-libgcc)
endif()

# Call sites in messages and reports are paths inside the project, wherever it was checked out. The second form is what a compiler
# cache makes of the first.
file(RELATIVE_PATH metrale_source_from_build ${CMAKE_BINARY_DIR} ${PROJECT_SOURCE_DIR})
add_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}/= -ffile-prefix-map=${metrale_source_from_build}=)

# With its base folder set, the cache serves other checkouts too.
find_program(METRALE_CCACHE ccache)
if(METRALE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${METRALE_CCACHE})
endif()
