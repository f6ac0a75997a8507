# SPDX-License-Identifier: Apache-2.0
# metrale_library(name SOURCES … PUBLIC … PRIVATE …) makes metrale_<name> with the alias metrale::<name>, the project's warnings,
# and include/ on its path. metrale_warnings(target) gives the warnings alone, for tools and tests.
function(metrale_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wunused
    $<$<BOOL:${METRALE_WARNINGS_AS_ERRORS}>:-Werror>)
endfunction()

function(metrale_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(metrale_${name} STATIC ${arg_SOURCES})
  add_library(metrale::${name} ALIAS metrale_${name})
  set_target_properties(metrale_${name} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(metrale_${name}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_compile_features(metrale_${name} PUBLIC cxx_std_20)
  target_link_libraries(metrale_${name} PUBLIC ${arg_PUBLIC} PRIVATE ${arg_PRIVATE})
  metrale_warnings(metrale_${name})
  set_property(GLOBAL APPEND PROPERTY METRALE_LIBRARIES metrale_${name})
endfunction()

# metrale_test(path/name_test.cpp LIBS …): one GoogleTest program, each of its cases a CTest test.
function(metrale_test source)
  cmake_parse_arguments(arg "" "" "LIBS;SOURCES" ${ARGN})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE METRALE_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data")
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gmock GTest::gtest_main)
  metrale_warnings(${name})
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endfunction()
