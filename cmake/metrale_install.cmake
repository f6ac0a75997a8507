# SPDX-License-Identifier: Apache-2.0
# Install rules and the CMake package: `find_package(metrale)` gives the targets metrale::<library> of this build.
include(CMakePackageConfigHelpers)
set(metrale_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/metrale)

get_property(metrale_libraries GLOBAL PROPERTY METRALE_LIBRARIES)
foreach(library IN LISTS metrale_libraries)
  get_target_property(header_sets ${library} INTERFACE_HEADER_SETS)
  if(header_sets)
    install(TARGETS ${library} EXPORT metrale FILE_SET HEADERS)
  else()
    install(TARGETS ${library} EXPORT metrale)
  endif()
endforeach()
install(EXPORT metrale NAMESPACE metrale:: FILE metrale-targets.cmake DESTINATION ${metrale_package_dir})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/metrale-config.cmake.in ${PROJECT_BINARY_DIR}/metrale-config.cmake
  INSTALL_DESTINATION ${metrale_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/metrale-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/metrale-config.cmake ${PROJECT_BINARY_DIR}/metrale-config-version.cmake
  DESTINATION ${metrale_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
