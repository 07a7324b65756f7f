# nlohmann/json, headers only, used inside libposembed and never by its users: the system's package, else a folder
# (NLOHMANN_JSON_ROOT, an option or an environment variable; for machines without network), else the PyPI package of
# the building interpreter, else a download.
find_package(nlohmann_json 3.10 CONFIG QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  set(json_folders ${NLOHMANN_JSON_ROOT} $ENV{NLOHMANN_JSON_ROOT})
  if(POSEMBED_PYTHON)
    _posembed_package_of_python(${POSEMBED_PYTHON} nlohmann_json json_package)
    list(APPEND json_folders ${json_package})
  endif()
  find_path(json_include nlohmann/json.hpp PATHS ${json_folders} PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  if(json_include)
    add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
    target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${json_include})
  else()
    include(FetchContent)
    FetchContent_Declare(nlohmann_json
      GIT_REPOSITORY https://github.com/nlohmann/json.git GIT_TAG v3.12.0 GIT_SHALLOW ON)
    set(JSON_SystemInclude ON)
    FetchContent_MakeAvailable(nlohmann_json)
  endif()
endif()
