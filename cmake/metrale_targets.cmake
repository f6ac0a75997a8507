# SPDX-License-Identifier: Apache-2.0
# How the project's own targets are made. Third-party libraries named here follow METRALE_STATIC_THIRD_PARTY.

# metrale_warnings(target): the project's warnings, for libraries, tools and tests alike.
function(metrale_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wunused
    $<$<CXX_COMPILER_ID:Clang>:-Wno-gnu-statement-expression-from-macro-expansion>
    $<$<BOOL:${METRALE_WARNINGS_AS_ERRORS}>:-Werror>)
endfunction()

# metrale_static_third_party(list_variable): in a portable build, swaps shared libraries that Debian has no archive of for their
# header-only twins. Nothing otherwise.
function(metrale_static_third_party variable)
  if(METRALE_STATIC_THIRD_PARTY)
    list(TRANSFORM ${variable} REPLACE "^fmt::fmt$" "fmt::fmt-header-only")
    list(TRANSFORM ${variable} REPLACE "^spdlog::spdlog$" "spdlog::spdlog_header_only")
    set(${variable} "${${variable}}" PARENT_SCOPE)
  endif()
endfunction()

# metrale_library(name SOURCES … HEADERS … PUBLIC … PRIVATE …) makes metrale_<name> with the alias metrale::<name>, the project's
# warnings, and include/ on its path. HEADERS are the public headers it owns, as users include them ("metrale/result.h"): they are
# installed with it, and each is compiled alone.
function(metrale_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;HEADERS;PUBLIC;PRIVATE" ${ARGN})
  add_library(metrale_${name} STATIC ${arg_SOURCES})
  add_library(metrale::${name} ALIAS metrale_${name})
  set_target_properties(metrale_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(metrale_${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_features(metrale_${name} PUBLIC cxx_std_20)
  if(arg_HEADERS)
    list(TRANSFORM arg_HEADERS PREPEND ${PROJECT_SOURCE_DIR}/include/)
    target_sources(metrale_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${arg_HEADERS})
    set_property(GLOBAL APPEND PROPERTY METRALE_HEADERS ${arg_HEADERS})
  endif()
  metrale_static_third_party(arg_PUBLIC)
  metrale_static_third_party(arg_PRIVATE)
  target_link_libraries(metrale_${name} PUBLIC ${arg_PUBLIC} PRIVATE ${arg_PRIVATE})
  metrale_warnings(metrale_${name})
  set_property(GLOBAL APPEND PROPERTY METRALE_LIBRARIES metrale_${name})
endfunction()

# metrale_test(path/name_test.cpp LABEL … LIBS … SOURCES …): one GoogleTest program, each of its cases a CTest test. It runs in the
# top folder, so that METRALE_TEST_DATA holds no path of this machine and compiler caches serve every checkout.
function(metrale_test source)
  cmake_parse_arguments(arg "" "LABEL" "LIBS;SOURCES" ${ARGN})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE METRALE_TEST_DATA="tests/data")
  metrale_static_third_party(arg_LIBS)
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gmock GTest::gtest_main)
  metrale_warnings(${name})
  gtest_discover_tests(${name} NO_PRETTY_VALUES WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 300 LABELS "${arg_LABEL}")
endfunction()
